// Where libpylloyal is: the words that pkg-config (or `pylloyal config --libs`) gives, in PYLLOYAL_LIBS.
fn main() {
    println!("cargo:rerun-if-env-changed=PYLLOYAL_LIBS");
    let words = std::env::var("PYLLOYAL_LIBS").expect("PYLLOYAL_LIBS: what `pkg-config --libs pylloyal` prints");
    for word in words.split_whitespace() {
        if let Some(folder) = word.strip_prefix("-L") {
            println!("cargo:rustc-link-search=native={folder}");
        } else if !word.starts_with("-l") {
            println!("cargo:rustc-link-arg={word}");
        }
    }
}
