//! Whose allocator a replay is to be by.

use std::str::FromStr;

use lastref::alloc::pytorch::Settings;

/// What `--policy` names.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Policy {
    /// This project's own.
    Lastref,
    /// PyTorch's, with these settings.
    PyTorch(Settings),
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        match name {
            "pytorch" => match settings.parse() {
                Ok(settings) => Ok(Self::PyTorch(settings)),
                Err(error) => Err(format!("{error}")),
            },
            "lastref" if settings.is_empty() => Ok(Self::Lastref),
            _ => Err("expected lastref, pytorch or pytorch:SETTINGS".into()),
        }
    }
}

/// Says in words what the settings are.
pub(crate) fn described(settings: &Settings) -> String {
    let text = settings.to_string();
    if text.is_empty() {
        "default settings".into()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_a_name_and_settings() {
        assert_eq!("lastref".parse(), Ok(Policy::Lastref));
        assert_eq!("pytorch".parse(), Ok(Policy::PyTorch(Settings::default())));
        let Ok(Policy::PyTorch(settings)) = "pytorch:expandable_segments:True".parse() else {
            panic!("no policy");
        };
        assert_eq!(described(&settings), "expandable_segments:True");
        for text in [
            "",
            "torch",
            "lastref:a:b",
            "pytorch:a:b",
            "pytorch:expandable_segments",
        ] {
            assert!(text.parse::<Policy>().is_err(), "{text}");
        }
    }
}
