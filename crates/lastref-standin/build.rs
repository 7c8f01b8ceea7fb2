//! Functions of the library refer to each other and not to another library's of the same name. So a function can be taken
//! out of a copy without the copy missing it.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rerun-if-changed=build.rs");
}
