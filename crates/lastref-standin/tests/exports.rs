//! What programs need is there, by name.

mod support;

#[test]
fn every_function_that_programs_need_is_exported() {
    let needed = include_str!("../testdata/needed.txt");
    assert!(needed.lines().count() > 500);
    let missing: Vec<&str> = needed
        .lines()
        .filter(|name| {
            let name = format!("{name}\0");
            // SAFETY: it is only looked for.
            unsafe { support::library().get::<extern "C" fn()>(name.as_bytes()) }.is_err()
        })
        .collect();
    assert!(missing.is_empty(), "not exported: {missing:?}");
}
