//! The class of PyTorch's that the shim wraps: its virtual functions, as they are in a version's headers.
//!
//! The shim forwards every one. A version that adds one is wrapped wrongly until the shim does too, and a version that
//! changes one does not compile; so before a version is declared known, this says what is different.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::workspace::Workspace;

/// Where the class and its bases are.
pub(super) const HEADERS: [&str; 3] = [
    "c10/core/Allocator.h",
    "c10/core/CachingDeviceAllocator.h",
    "c10/cuda/CUDACachingAllocator.h",
];

/// The class and its bases, in the order of the headers.
const CLASSES: [&str; 3] = ["Allocator", "DeviceAllocator", "CUDAAllocator"];

/// The functions of the version that the shim was last compared with.
const RECORDED: &str = "xtask/testdata/torch-allocator-2.15.txt";

/// The shim, and what it says it knows.
const SHIM_SOURCE: &str = "python/lastref/torch/_shim/lastref_torch.cpp";
const SHIM: &str = "python/lastref/torch/_shim.py";

/// Each function by class and name, with its signature: names of parameters and default arguments left out.
type Functions = BTreeMap<String, BTreeSet<String>>;

/// Says what is different in the class of a version, and whether the shim knows that version.
pub(crate) fn changes(workspace: &Workspace, version: &str) -> Result<()> {
    let theirs = read(&super::headers_of(workspace, version)?)?;
    let recorded = recorded(workspace)?;
    let lines = differences(&recorded, &theirs);
    println!("the wrapped class in torch {version}, compared with {RECORDED}:");
    if lines.is_empty() {
        let count: usize = theirs.values().map(BTreeSet::len).sum();
        println!("  the same {count} virtual functions");
    }
    for line in lines {
        println!("  {line}");
    }
    let shim = fs::read_to_string(workspace.root.join(SHIM))
        .with_context(|| format!("cannot read {SHIM}"))?;
    let minor: Vec<&str> = version.split('.').take(2).collect();
    if known(&shim)?.contains(&format!("({})", minor.join(", "))) {
        println!("the shim knows torch {}", minor.join("."));
    } else {
        println!(
            "the shim does not know torch {}: forward what was added in lastref_torch.cpp, widen its #if, add the \
             version to KNOWN_VERSIONS in {SHIM} and to VERSIONS in xtask/src/torch, and run the tests",
            minor.join(".")
        );
    }
    Ok(())
}

/// The record is what the newest known version has, and the shim has an override for each function in it.
pub(super) fn check_recorded(workspace: &Workspace, headers: &Path) -> Result<()> {
    let recorded = recorded(workspace)?;
    let shim = fs::read_to_string(workspace.root.join(SHIM_SOURCE))
        .with_context(|| format!("cannot read {SHIM_SOURCE}"))?;
    let missing = without_override(&recorded, &shim);
    ensure!(
        missing.is_empty(),
        "{SHIM_SOURCE} does not forward {}",
        missing.join(", ")
    );
    let lines = differences(&recorded, &read(headers)?);
    ensure!(
        lines.is_empty(),
        "{RECORDED} is not what {} has:\n{}",
        headers.display(),
        lines.join("\n")
    );
    Ok(())
}

/// Names of functions which the shim has no override of.
fn without_override(functions: &Functions, shim: &str) -> Vec<String> {
    let shim = without_comments(shim);
    let overridden: BTreeSet<String> = declarations(&body_of(&shim, "Guard").unwrap_or_default())
        .iter()
        .filter_map(|declaration| signature(declaration))
        .filter_map(|signature| name_of(&signature).map(str::to_owned))
        .collect();
    functions
        .keys()
        .filter_map(|key| key.rsplit("::").next())
        .filter(|name| !overridden.contains(*name))
        .map(str::to_owned)
        .collect()
}

fn recorded(workspace: &Workspace) -> Result<Functions> {
    let text = fs::read_to_string(workspace.root.join(RECORDED))
        .with_context(|| format!("cannot read {RECORDED}"))?;
    let mut functions = Functions::new();
    for line in text.lines() {
        insert(&mut functions, line.to_owned());
    }
    Ok(functions)
}

/// The list of versions in the shim's Python part, as text.
fn known(shim: &str) -> Result<&str> {
    shim.lines()
        .find_map(|line| line.strip_prefix("KNOWN_VERSIONS = "))
        .with_context(|| format!("{SHIM} does not say KNOWN_VERSIONS"))
}

fn read(headers: &Path) -> Result<Functions> {
    let mut functions = Functions::new();
    for (header, class) in HEADERS.iter().zip(CLASSES) {
        let path = headers.join(header);
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let body = body_of(&without_comments(&text), class)
            .with_context(|| format!("{} has no class {class}", path.display()))?;
        for declaration in declarations(&body) {
            if let Some(signature) = signature(&declaration) {
                insert(&mut functions, format!("{class}: {signature}"));
            }
        }
    }
    Ok(functions)
}

fn insert(functions: &mut Functions, line: String) {
    let class = line.split(':').next().unwrap_or_default();
    let name = name_of(&line).unwrap_or_default();
    let key = format!("{class}::{name}");
    functions.entry(key).or_default().insert(line);
}

/// A function's name in its signature.
fn name_of(signature: &str) -> Option<&str> {
    signature.split('(').next()?.rsplit([' ', '*', '&']).next()
}

fn differences(ours: &Functions, theirs: &Functions) -> Vec<String> {
    let names: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    let mut lines = Vec::new();
    for name in names {
        match (ours.get(name), theirs.get(name)) {
            (Some(ours), None) => {
                lines.extend(ours.iter().map(|line| format!("removed  {line}")));
            }
            (None, Some(theirs)) => {
                lines.extend(theirs.iter().map(|line| format!("added    {line}")));
            }
            (Some(ours), Some(theirs)) if ours != theirs => {
                lines.extend(
                    ours.difference(theirs)
                        .map(|line| format!("was      {line}")),
                );
                lines.extend(
                    theirs
                        .difference(ours)
                        .map(|line| format!("is now   {line}")),
                );
            }
            _ => {}
        }
    }
    lines
}

// ---- just enough C++ --------------------------------------------------------------------------------------

fn without_comments(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("//").into_iter().chain(rest.find("/*")).min() {
        out += &rest[..at];
        let (end, skip) = if rest[at..].starts_with("//") {
            ("\n", 0)
        } else {
            ("*/", 2)
        };
        rest = rest[at..]
            .find(end)
            .map_or("", |length| &rest[at + length + skip..]);
    }
    out + rest
}

/// The text between the braces of a class's definition.
fn body_of(text: &str, class: &str) -> Option<String> {
    for keyword in ["class", "struct"] {
        for (at, _) in text.match_indices(&format!("{keyword} ")) {
            let head = text[at..].split(['{', ';']).next().unwrap_or_default();
            let name = head.split(" : ").next().unwrap_or_default();
            let name = name.trim_end_matches(" final");
            let defines = text[at + head.len()..].starts_with('{');
            if defines && name.split_whitespace().next_back() == Some(class) {
                let inside = &text[at + head.len() + 1..];
                let mut depth = 1;
                let end = inside.find(|c| {
                    depth += i32::from(c == '{') - i32::from(c == '}');
                    depth == 0
                })?;
                return Some(inside[..end].to_owned());
            }
        }
    }
    None
}

/// The declarations in a class's body, without the bodies of functions.
fn declarations(body: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut now = String::new();
    let (mut braces, mut brackets) = (0, 0);
    for c in body.chars() {
        match c {
            // Braces inside a parameter list are a default argument.
            '{' if brackets == 0 => {
                if braces == 0 {
                    found.push(std::mem::take(&mut now));
                }
                braces += 1;
            }
            '}' if brackets == 0 => braces -= 1,
            _ if braces > 0 => {}
            ';' => found.push(std::mem::take(&mut now)),
            _ => {
                brackets += i32::from(c == '(') - i32::from(c == ')');
                now.push(c);
            }
        }
    }
    found
}

/// A virtual function as one line; none for anything else.
fn signature(declaration: &str) -> Option<String> {
    let text = declaration.split_whitespace().collect::<Vec<_>>().join(" ");
    let is_virtual = text.split(' ').any(|word| word == "virtual");
    let (head, rest) = text.split_once('(')?;
    let (parameters, tail) = rest.rsplit_once(')')?;
    let overrides = tail.split(' ').any(|word| word == "override");
    if !is_virtual && !overrides || head.contains('~') {
        return None;
    }
    let head = head.rsplit("virtual ").next().unwrap_or(head);
    // What is left of `public:` and the like.
    let head = head.rsplit(": ").next().unwrap_or(head);
    let parameters: Vec<String> = at_commas(parameters)
        .iter()
        .map(|one| unnamed(one))
        .collect();
    let constant = if tail.contains("const") { " const" } else { "" };
    let pure = if tail.contains("= 0") { " = 0" } else { "" };
    Some(format!(
        "{} ({}){constant}{pure}",
        head.trim(),
        parameters.join(", ")
    ))
    .map(|line| line.replacen(" (", "(", 1))
}

/// A parameter list's parts: commas inside brackets do not count.
fn at_commas(parameters: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut depth = 0;
    for c in parameters.chars() {
        depth += i32::from("<({".contains(c)) - i32::from(">)}".contains(c));
        if c == ',' && depth == 0 {
            parts.push(String::new());
        } else if let Some(last) = parts.last_mut() {
            last.push(c);
        }
    }
    parts.retain(|part| !part.trim().is_empty());
    parts
}

/// A parameter's type.
fn unnamed(parameter: &str) -> String {
    let parameter = parameter.split('=').next().unwrap_or_default().trim();
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let type_ = parameter.trim_end_matches(is_word);
    // A type alone has no space before its last word, but for `const`.
    let named = type_.ends_with([' ', '&', '*', '>']) && type_ != "const " && !type_.is_empty();
    if named && parameter.len() > type_.len() {
        type_.trim().to_owned()
    } else {
        parameter.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
        // class Wrong { virtual void no(); };
        class Thing;
        class API Thing : public Base { public:
          virtual void* get(size_t bytes, Pair<int, int> id = {0, 0}) = 0; /* virtual void gone(); */
          void plain();
          virtual int count(Device /*device*/) { if (x) { return 1; } return 0; }
          virtual bool is(const Thing& other) const;
          std::pair<size_t, size_t> info(Device device) override { return {}; }
          virtual ~Thing() = default;
          virtual Name name(const std::string&, void* p) = 0;
        };";

    fn all(text: &str) -> Vec<String> {
        let body = body_of(&without_comments(text), "Thing").unwrap();
        declarations(&body)
            .iter()
            .filter_map(|declaration| signature(declaration))
            .collect()
    }

    #[test]
    fn virtual_functions_are_found_without_names_and_defaults() {
        assert_eq!(
            all(TEXT),
            [
                "void* get(size_t, Pair<int, int>) = 0",
                "int count(Device)",
                "bool is(const Thing&) const",
                "std::pair<size_t, size_t> info(Device)",
                "Name name(const std::string&, void*) = 0",
            ]
        );
    }

    #[test]
    fn what_the_shim_does_not_override_is_named() {
        let mut functions = Functions::new();
        insert(&mut functions, "A: void* get(size_t) = 0".to_owned());
        insert(&mut functions, "A: void forgotten()".to_owned());
        let shim = "class Guard final : public A { explicit Guard(A* a) : a_(a) { forgotten(); }
                    void* get(size_t n) override { return a_->get(n); } };";
        assert_eq!(without_override(&functions, shim), ["forgotten"]);
    }

    #[test]
    fn differences_are_named() {
        let functions = |lines: &[&str]| {
            let mut functions = Functions::new();
            for line in lines {
                insert(&mut functions, (*line).to_owned());
            }
            functions
        };
        let ours = functions(&["A: void f(int)", "A: void* g()", "A: void h()"]);
        let theirs = functions(&["A: void f(long)", "A: void* g()", "A: void i()"]);
        assert_eq!(
            differences(&ours, &theirs),
            [
                "was      A: void f(int)",
                "is now   A: void f(long)",
                "removed  A: void h()",
                "added    A: void i()",
            ]
        );
        assert!(differences(&ours, &ours).is_empty());
    }
}
