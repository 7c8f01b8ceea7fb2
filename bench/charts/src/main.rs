//! `lastref-bench-charts MEASURED CHARTS`: draws what the folder MEASURED holds into the folder CHARTS.
//!
//! Each chart is drawn twice, for light and for dark pages; the background is left out. Series differ in colour
//! (Okabe and Ito's palette, which colour-blind people can tell apart) and in the form of their marks.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use plotters::coord::Shift;
use plotters::element::DynElement;
use plotters::prelude::*;
use serde_json::Value;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

struct Theme {
    name: &'static str,
    ink: RGBColor,
    grid: RGBColor,
    series: [RGBColor; 4],
}

const THEMES: [Theme; 2] = [
    Theme {
        name: "light",
        ink: RGBColor(31, 35, 40),
        grid: RGBColor(209, 217, 224),
        series: [
            RGBColor(0, 114, 178),
            RGBColor(213, 94, 0),
            RGBColor(0, 158, 115),
            RGBColor(160, 80, 130),
        ],
    },
    Theme {
        name: "dark",
        ink: RGBColor(230, 237, 243),
        grid: RGBColor(61, 68, 77),
        series: [
            RGBColor(86, 180, 233),
            RGBColor(230, 159, 0),
            RGBColor(45, 196, 154),
            RGBColor(221, 150, 194),
        ],
    },
];

const FONT: &str = "sans-serif";
const WIDTH: u32 = 900;
/// Between rows of a chart of dots.
const ROW: u32 = 30;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [measured, charts] = &arguments[..] else {
        bail!("usage: lastref-bench-charts MEASURED CHARTS");
    };
    let read = |name: &str| -> Result<Value> {
        let path = Path::new(measured).join(name);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        serde_json::from_str(&text).with_context(|| path.display().to_string())
    };
    let (mechanisms, time) = (read("mechanisms.json")?, read("time.json")?);
    let torch = read("torch.json")?;
    fs::create_dir_all(charts)?;
    for theme in &THEMES {
        let to = |name: &str| Path::new(charts).join(format!("{name}-{}.svg", theme.name));
        memory(theme, &to("memory"), &mechanisms, &torch)?;
        without(theme, &to("mechanisms"), &mechanisms)?;
        hot_pair(theme, &to("hot-pair"), &time, &torch)?;
    }
    Ok(())
}

/// A row of dots: what it is called, and a value for each series that has one.
struct Row {
    name: String,
    values: Vec<Option<f64>>,
}

fn reports<'a>(mechanisms: &'a Value, name: &str) -> Result<&'a Vec<Value>> {
    let all = mechanisms.as_array().context("mechanisms are a list")?;
    let entry = all.iter().find(|entry| entry["name"] == name);
    entry
        .and_then(|entry| entry["given"].as_array())
        .with_context(|| format!("nothing was measured without {name}"))
}

fn number(report: &Value, field: &str) -> Result<f64> {
    let number = report[field].as_f64();
    number.with_context(|| format!("no number {field} in {report}"))
}

/// Per cent of the live bytes that are reserved and not live. What is less than can be seen is drawn there.
fn waste(report: &Value, field: &str) -> Result<f64> {
    Ok(((number(report, field)? - 1.0) * 100.0).max(LEAST_WASTE))
}

const LEAST_WASTE: f64 = 0.02;

/// Waste on each trace, of lastref and of PyTorch.
fn memory(theme: &Theme, path: &Path, mechanisms: &Value, torch: &Value) -> Result<()> {
    let mut rows = Vec::new();
    for report in reports(mechanisms, "nothing")? {
        let trace = report["trace"].as_str().context("a report has a trace")?;
        let theirs = |who: &str| waste(&torch["replays"][trace][who], "reserved_over_live");
        let values = [
            waste(report, "reserved_over_live")?,
            theirs("torch_native")?,
            theirs("torch_expandable")?,
        ];
        rows.push(Row {
            name: trace.to_owned(),
            values: values.map(Some).to_vec(),
        });
    }
    let labels = ["lastref", "PyTorch, native", "PyTorch, expandable segments"];
    dots(
        theme,
        path,
        "reserved at the peak and not live, % of what is live",
        &labels,
        &rows,
    )
}

/// Waste on the mean and on the worst trace, without each mechanism.
fn without(theme: &Theme, path: &Path, mechanisms: &Value) -> Result<()> {
    let mut rows = Vec::new();
    for entry in mechanisms.as_array().context("mechanisms are a list")? {
        let name = entry["name"].as_str().context("a mechanism has a name")?;
        let mut wastes = Vec::new();
        for report in reports(mechanisms, name)? {
            wastes.push(waste(report, "reserved_over_live")?);
        }
        let mean = wastes.iter().sum::<f64>() / wastes.len() as f64;
        let worst = wastes.iter().copied().fold(0.0, f64::max);
        let name = if name == "nothing" {
            "as it is".to_owned()
        } else {
            format!("without {name}")
        };
        rows.push(Row {
            name,
            values: vec![Some(mean), Some(worst)],
        });
    }
    let labels = ["mean of the traces", "worst trace"];
    dots(
        theme,
        path,
        "reserved at the peak and not live, % of what is live",
        &labels,
        &rows,
    )
}

/// A chart of dots in rows, on a scale of powers of ten.
fn dots(theme: &Theme, path: &Path, what: &str, labels: &[&str], rows: &[Row]) -> Result<()> {
    let height = ROW * rows.len() as u32 + 110;
    let area = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    let most = rows
        .iter()
        .flat_map(|row| row.values.iter().flatten())
        .copied();
    let most = most.fold(1.0, f64::max) * 1.5;
    let last = rows.len() as i32;
    let mut chart = ChartBuilder::on(&area)
        .margin(8)
        .margin_top(40)
        .margin_right(24)
        .x_label_area_size(48)
        .y_label_area_size(290)
        .build_cartesian_2d(
            (LEAST_WASTE * 0.8..most).log_scale(),
            (0..last - 1).into_segmented(),
        )?;
    let font = (FONT, 14).into_font().color(&theme.ink);
    chart
        .configure_mesh()
        .bold_line_style(theme.grid)
        .light_line_style(TRANSPARENT)
        .axis_style(theme.grid)
        .y_labels(rows.len())
        .x_label_formatter(&|value| format!("{value}"))
        .y_label_formatter(&|value| match value {
            // The first row is at the top.
            SegmentValue::CenterOf(at) => rows
                .get((last - 1 - at) as usize)
                .map_or_else(String::new, |row| row.name.clone()),
            _ => String::new(),
        })
        .label_style(font.clone())
        .axis_desc_style(font)
        .x_desc(what)
        .draw()?;
    for (series, label) in labels.iter().enumerate() {
        let points = rows.iter().enumerate().filter_map(|(row, of)| {
            Some((
                of.values[series]?,
                SegmentValue::CenterOf(last - 1 - row as i32),
            ))
        });
        let points: Vec<_> = points.collect();
        let color = theme.series[series];
        chart.draw_series(points.into_iter().map(|at| mark(at, series, color)))?;
        key(theme, &area, series, label)?;
    }
    area.present()?;
    Ok(())
}

/// Nanoseconds of a hot pair by size.
fn hot_pair(theme: &Theme, path: &Path, time: &Value, torch: &Value) -> Result<()> {
    let series = [
        ("lastref", time, "hot_pair_ns"),
        ("PyTorch, native", torch, "torch_native_hot_ns"),
        ("mimalloc", time, "mimalloc_hot_ns"),
        ("ordered sets", time, "ordered_sets_hot_ns"),
    ];
    let area = SVGBackend::new(path, (WIDTH, 420)).into_drawing_area();
    let mut lines = Vec::new();
    for (_, data, field) in series {
        let by_size = data[field]
            .as_object()
            .with_context(|| format!("no {field}"))?;
        let mut points = Vec::new();
        for (bytes, ns) in by_size {
            points.push((bytes.parse::<f64>()?, ns.as_f64().context("a number")?));
        }
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        lines.push(points);
    }
    let all = || lines.iter().flatten();
    let (least, most) = all().fold((f64::MAX, 0.0_f64), |(least, most), (_, ns)| {
        (least.min(*ns), most.max(*ns))
    });
    let (first, last) = all().fold((f64::MAX, 0.0_f64), |(first, last), (bytes, _)| {
        (first.min(*bytes), last.max(*bytes))
    });
    let mut chart = ChartBuilder::on(&area)
        .margin(8)
        .margin_top(40)
        .margin_right(24)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (first * 0.8..last * 1.25).log_scale().base(4.0),
            (least * 0.7..most * 1.4).log_scale(),
        )?;
    let font = (FONT, 14).into_font().color(&theme.ink);
    chart
        .configure_mesh()
        .bold_line_style(theme.grid)
        .light_line_style(TRANSPARENT)
        .axis_style(theme.grid)
        .x_labels(10)
        .x_label_formatter(&|bytes| size(*bytes))
        .y_label_formatter(&|ns| format!("{ns}"))
        .label_style(font.clone())
        .axis_desc_style(font)
        .x_desc("size of the block")
        .y_desc("nanoseconds, host")
        .draw()?;
    for (at, points) in lines.into_iter().enumerate() {
        let color = theme.series[at];
        chart.draw_series(LineSeries::new(
            points.iter().copied(),
            color.stroke_width(2),
        ))?;
        chart.draw_series(points.into_iter().map(|point| mark(point, at, color)))?;
        key(theme, &area, at, series[at].0)?;
    }
    area.present()?;
    Ok(())
}

fn size(bytes: f64) -> String {
    match bytes as u64 {
        bytes @ 0..1024 => format!("{bytes} B"),
        bytes @ 1024..1_048_576 => format!("{} KiB", bytes >> 10),
        bytes => format!("{} MiB", bytes >> 20),
    }
}

/// A mark, whose form tells its series too.
fn mark<'a, C: Clone + 'static>(
    at: C,
    series: usize,
    color: RGBColor,
) -> DynElement<'static, SVGBackend<'a>, C> {
    match series {
        0 => Circle::new(at, 6, color.filled()).into_dyn(),
        1 => TriangleMarker::new(at, 7, color.filled()).into_dyn(),
        2 => Cross::new(at, 6, color.stroke_width(3)).into_dyn(),
        _ => Circle::new(at, 6, color.stroke_width(3)).into_dyn(),
    }
}

/// The name of a series, above the chart.
fn key(theme: &Theme, area: &Area<'_>, series: usize, label: &str) -> Result<()> {
    let x = 24 + 220 * series as i32;
    area.draw(&mark((x, 20), series, theme.series[series]))?;
    let font = (FONT, 15).into_font().color(&theme.ink);
    area.draw(&Text::new(label.to_owned(), (x + 14, 13), font))?;
    Ok(())
}
