use std::fmt;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::digest::{SHA256, digest};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

/// Seals subscribers' credentials, in the database and on the bus alike.
///
/// A sealed text is `1 ‖ key id (4) ‖ nonce (12) ‖ ciphertext and tag`, bound to its subscription: it cannot be
/// opened for another one.
#[derive(Clone)]
pub struct Sealer {
    key: Arc<LessSafeKey>,
    digest_key: hmac::Key,
    key_id: [u8; 4],
    random: SystemRandom,
}

const VERSION: u8 = 1;
const KEY_LENGTH: usize = 32;
const HEAD: usize = 1 + 4 + NONCE_LEN;

/// Why credentials cannot be sealed or opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretError {
    #[error("key file {path} cannot be read or made: check its folder and its permissions")]
    KeyFile {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(
        "key file {path} is missing, and credentials in the database are sealed with it: restore it from a backup; if it is \
         lost for good, make a new one with `posthaste secrets generate >{path} && chmod 600 {path}` and give every subscription \
         its credentials again", path = .0.display()
    )]
    Missing(PathBuf),
    #[error(
        "key file {path} is missing, and all servers on this database need the same key: copy it from another server, or make \
         one with `posthaste secrets generate >{path} && chmod 600 {path}`", path = .0.display()
    )]
    Unshared(PathBuf),
    #[error("key file {} can be used by other users (mode {mode:03o}): run `chmod 600 {}`", path.display(), path.display())]
    NotPrivate { path: PathBuf, mode: u32 },
    #[error("key file {0} does not hold 64 hexadecimal digits: restore it from a backup")]
    BadKey(PathBuf),
    #[error("the system's source of randomness failed")]
    Random,
    #[error("the credentials were sealed with another key: restore the key file that belongs to this database")]
    OtherKey,
    #[error("the sealed credentials are damaged")]
    Damaged,
}

impl Sealer {
    /// Reads the key. If there is no key file, makes one that only its owner can read.
    pub fn open(path: &Path) -> Result<Self, SecretError> {
        match Self::read(path) {
            Err(SecretError::Missing(_)) => {
                let text = Self::new_key()?;
                write_key(path, &text).map_err(|source| SecretError::KeyFile { path: path.to_owned(), source })?;
                Self::read(path)
            }
            read => read,
        }
    }

    /// A new key, as a key file holds it.
    pub fn new_key() -> Result<String, SecretError> {
        let mut key = [0; KEY_LENGTH];
        SystemRandom::new().fill(&mut key).map_err(|_| SecretError::Random)?;
        Ok(key.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Reads the key from a file that only its owner can use.
    pub fn read(path: &Path) -> Result<Self, SecretError> {
        let key_file = |source: std::io::Error| match source.kind() {
            std::io::ErrorKind::NotFound => SecretError::Missing(path.to_owned()),
            _ => SecretError::KeyFile { path: path.to_owned(), source },
        };
        let mut file = std::fs::File::open(path).map_err(key_file)?;
        let metadata = file.metadata().map_err(key_file)?;
        let mode = metadata.mode() & 0o777;
        // Secrets that an orchestrator mounts belong to root, and the process reads them through its group.
        let too_open = if metadata.uid() == 0 { 0o037 } else { 0o077 };
        if mode & too_open != 0 {
            return Err(SecretError::NotPrivate { path: path.to_owned(), mode });
        }
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(key_file)?;
        let key = parse_key(text.trim()).ok_or_else(|| SecretError::BadKey(path.to_owned()))?;
        Self::with_key(&key, SystemRandom::new()).ok_or_else(|| SecretError::BadKey(path.to_owned()))
    }

    fn with_key(key: &[u8; KEY_LENGTH], random: SystemRandom) -> Option<Self> {
        let mut key_id = [0; 4];
        key_id.copy_from_slice(&digest(&SHA256, key).as_ref()[..4]);
        // Each purpose has its own key.
        let digest_key = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), b"posthaste digest");
        let digest_key = hmac::Key::new(hmac::HMAC_SHA256, digest_key.as_ref());
        let key = UnboundKey::new(&CHACHA20_POLY1305, key).ok()?;
        Some(Self { key: Arc::new(LessSafeKey::new(key)), digest_key, key_id, random })
    }

    /// A digest that is equal for equal texts. Without the key, a guess of the text cannot be checked against it.
    pub fn keyed_digest(&self, text: &[u8]) -> Vec<u8> {
        hmac::sign(&self.digest_key, text).as_ref().to_vec()
    }

    pub fn seal(&self, subscription_id: &str, secret: &[u8]) -> Result<Vec<u8>, SecretError> {
        let mut nonce = [0; NONCE_LEN];
        self.random.fill(&mut nonce).map_err(|_| SecretError::Random)?;
        let mut sealed = Vec::with_capacity(HEAD + secret.len() + CHACHA20_POLY1305.tag_len());
        sealed.push(VERSION);
        sealed.extend_from_slice(&self.key_id);
        sealed.extend_from_slice(&nonce);
        let mut text = secret.to_vec();
        let aad = Aad::from(subscription_id.as_bytes());
        let nonce = Nonce::assume_unique_for_key(nonce);
        self.key.seal_in_place_append_tag(nonce, aad, &mut text).map_err(|_| SecretError::Damaged)?;
        sealed.append(&mut text);
        Ok(sealed)
    }

    pub fn open_sealed(&self, subscription_id: &str, sealed: &[u8]) -> Result<Vec<u8>, SecretError> {
        let (head, text) = sealed.split_at_checked(HEAD).ok_or(SecretError::Damaged)?;
        if head[0] != VERSION {
            return Err(SecretError::Damaged);
        }
        if head[1..5] != self.key_id {
            return Err(SecretError::OtherKey);
        }
        let nonce = Nonce::try_assume_unique_for_key(&head[5..]).map_err(|_| SecretError::Damaged)?;
        let mut text = text.to_vec();
        let aad = Aad::from(subscription_id.as_bytes());
        let length = self.key.open_in_place(nonce, aad, &mut text).map_err(|_| SecretError::Damaged)?.len();
        text.truncate(length);
        Ok(text)
    }
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealer").finish_non_exhaustive()
    }
}

/// A digest that is equal for equal texts. A guess of the text can be checked against it without a key.
pub(crate) fn plain_digest(text: &[u8]) -> Vec<u8> {
    digest(&SHA256, text).as_ref().to_vec()
}

/// Writes the whole key file or nothing: a crash must not leave an empty file.
fn write_key(path: &Path, text: &str) -> std::io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&new, path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::File::open(folder)?.sync_all()
}

fn parse_key(text: &str) -> Option<[u8; KEY_LENGTH]> {
    let mut key = [0; KEY_LENGTH];
    if text.len() != 2 * KEY_LENGTH || !text.is_ascii() {
        return None;
    }
    for (index, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).ok()?;
    }
    Some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_credentials_open_only_for_their_subscription() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.key");
        let sealer = Sealer::open(&path).unwrap();
        let sealed = sealer.seal("sub-1", b"hunter2").unwrap();
        assert!(!sealed.windows(7).any(|window| window == b"hunter2"));
        let again = Sealer::open(&path).unwrap();
        assert_eq!(again.open_sealed("sub-1", &sealed).unwrap(), b"hunter2");
        assert!(matches!(again.open_sealed("sub-2", &sealed), Err(SecretError::Damaged)));
        assert!(matches!(again.open_sealed("sub-1", &sealed[..10]), Err(SecretError::Damaged)));
        let other = Sealer::open(&folder.path().join("y.key")).unwrap();
        assert!(matches!(other.open_sealed("sub-1", &sealed), Err(SecretError::OtherKey)));
    }

    #[test]
    fn the_key_is_readable_by_its_owner_only_and_a_bad_one_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.key");
        Sealer::open(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        for mode in [0o644, 0o604, 0o660] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert!(matches!(Sealer::open(&path), Err(SecretError::NotPrivate { .. })), "{mode:o}");
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o400)).unwrap();
        Sealer::open(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&path, "not a key").unwrap();
        assert!(matches!(Sealer::open(&path), Err(SecretError::BadKey(_))));
        let missing = folder.path().join("y.key");
        assert!(matches!(Sealer::read(&missing), Err(SecretError::Missing(_))));
    }
}
