//! The rows as a table and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

/// What a row must be for lastref.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    /// At most so many times that of another.
    Ratio(&'static str, f64),
    /// At most so much, in the row's unit.
    AtMost(f64),
}

/// What one implementation took, round by round.
pub(crate) struct Measured {
    pub(crate) peer: String,
    pub(crate) samples: Vec<f64>,
}

/// One work, and what every implementation took for it.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) target: Target,
    /// lastref comes first.
    pub(crate) measured: Vec<Measured>,
}

const COLUMNS: [&str; 7] = [
    "lastref",
    "Arc",
    "rust-cc",
    "dumpster",
    "dumpster sync",
    "bacon_rajan",
    "CPython",
];

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    let middle = samples.len() / 2;
    match samples.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => samples[middle],
        _ => f64::midpoint(samples[middle - 1], samples[middle]),
    }
}

impl Row {
    fn samples(&self, peer: &str) -> Option<&[f64]> {
        let found = self.measured.iter().find(|measured| measured.peer == peer);
        found.map(|measured| measured.samples.as_slice())
    }

    fn median(&self, peer: &str) -> Option<f64> {
        self.samples(peer).map(|samples| median(samples.to_vec()))
    }

    /// The median of the ratios within each round.
    fn ratio(&self, peer: &str, base: &str) -> Option<f64> {
        let (ours, base) = (self.samples(peer)?, self.samples(base)?);
        Some(median(ours.iter().zip(base).map(|(a, b)| a / b).collect()))
    }

    /// What the target is about, and the most it may be.
    fn judged(&self) -> (f64, f64) {
        match self.target {
            Target::Ratio(base, most) => (self.ratio("lastref", base).unwrap_or(f64::NAN), most),
            Target::AtMost(most) => (self.median("lastref").unwrap_or(f64::NAN), most),
        }
    }

    fn is_met(&self) -> bool {
        let (found, most) = self.judged();
        found <= most
    }
}

pub(crate) fn table(rows: &[Row]) -> String {
    let mut out = format!("{:<28}", "");
    for column in COLUMNS {
        let _ = write!(out, " {column:>13}");
    }
    let _ = writeln!(out, " {:>22}", "lastref's target");
    for row in rows {
        let _ = write!(out, "{:<28}", format!("{}, {}", row.name, row.unit));
        for column in COLUMNS {
            let cell = row.median(column).map(|median| {
                let digits = if median < 10.0 { 2 } else { 1 };
                format!("{median:.digits$}")
            });
            let _ = write!(out, " {:>13}", cell.unwrap_or_default());
        }
        let (found, most) = row.judged();
        let judged = match row.target {
            Target::Ratio(base, _) => format!("{found:.2} of {most} x {base}"),
            Target::AtMost(_) => format!("{found:.2} of {most} {}", row.unit),
        };
        let mark = if row.is_met() { "" } else { " MISSED" };
        let _ = writeln!(out, " {judged:>22}{mark}");
    }
    out + "\nMedians of rounds in which each had its turn; ratios are medians of the ratios within rounds. \
           Automatic\ncollections are off. rust-cc, dumpster and bacon_rajan are for one thread, dumpster sync is for threads.\n"
}

pub(crate) fn json(rows: &[Row]) -> Value {
    rows.iter()
        .map(|row| {
            let measured: Vec<Value> = row
                .measured
                .iter()
                .map(|measured| {
                    let least = measured.samples.iter().copied().fold(f64::NAN, f64::min);
                    let most = measured.samples.iter().copied().fold(f64::NAN, f64::max);
                    json!({
                        "peer": measured.peer,
                        "median": median(measured.samples.clone()),
                        "min": least,
                        "max": most,
                        "ratio_to_arc": row.ratio(&measured.peer, "Arc"),
                    })
                })
                .collect();
            let (found, most) = row.judged();
            let kind = match row.target {
                Target::Ratio(..) => "ratio_to_arc",
                Target::AtMost(_) => "median",
            };
            json!({
                "row": row.name,
                "unit": row.unit,
                "measured": measured,
                "target": { "of": kind, "found": found, "at_most": most, "met": row.is_met() },
            })
        })
        .collect()
}
