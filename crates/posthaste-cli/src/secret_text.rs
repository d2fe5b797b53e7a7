//! Values of the configuration that may be in files, so that secrets need not be in the configuration.

/// A value that begins with this is the name of a file that contains the value.
const FILE: &str = "file:";

/// The value itself, or the contents of the file that it names, without the end of the last line. `key` is for the error.
pub fn resolve(key: &str, value: &str) -> Result<String, String> {
    let Some(path) = value.strip_prefix(FILE) else { return Ok(value.to_owned()) };
    let text = std::fs::read_to_string(path);
    let text = text.map_err(|error| format!("{key} is in file {path}, which cannot be read: {error}"))?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_read_from_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, "s3cret \r\n").unwrap();
        assert_eq!(resolve("k", &format!("file:{}", path.display())), Ok("s3cret ".to_owned()));
        assert_eq!(resolve("k", "plain"), Ok("plain".to_owned()));
        let error = resolve("some.key", "file:no/such/file").unwrap_err();
        assert!(error.starts_with("some.key is in file no/such/file, which cannot be read"), "{error}");
    }
}
