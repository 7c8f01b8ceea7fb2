//! What `#[derive(Trace)]` refuses, and with which words.

#[test]
fn what_cannot_be_traced_is_refused() {
    // The words are the compiler's, and change between its versions.
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/refused/*.rs");
}
