use crate::header;
use crate::request::Request;

/// The replacement for a secret.
const HIDDEN: &str = "***";

/// Shorter values are no secrets and occur everywhere ("1", "true"): hiding them would only make responses unreadable.
const MIN_GUESSED_SECRET: usize = 6;

/// The secrets of a request. What is stored of a response must not contain them, although subscribers may echo them.
#[derive(Default)]
pub(crate) struct Secrets(Vec<String>);

impl Secrets {
    pub(crate) fn of(request: &Request) -> Self {
        let mut secrets = request.auth.secrets();
        if let Some(query) = request.endpoint.uri().query() {
            secrets.push(query.to_owned());
            let written = query.split('&').map(|pair| pair.split_once('=').map_or(pair, |(_, value)| value));
            secrets.extend(written.filter(|value| value.len() >= MIN_GUESSED_SECRET).map(str::to_owned));
            let decoded = url::form_urlencoded::parse(query.as_bytes()).map(|(_, value)| value.into_owned());
            secrets.extend(decoded.filter(|value| value.len() >= MIN_GUESSED_SECRET));
        }
        let custom = request.headers.iter().filter(|(name, _)| !header::is_ours(name)).map(|(_, value)| value);
        secrets.extend(custom.filter(|value| value.len() >= MIN_GUESSED_SECRET).cloned());
        secrets.retain(|secret| !secret.is_empty());
        // The longest first: one secret may contain another.
        secrets.sort_unstable_by_key(|secret| std::cmp::Reverse(secret.len()));
        Self(secrets)
    }

    /// The start of `text`, at most `limit` bytes, without the secrets.
    pub(crate) fn hide_in(&self, text: &str, limit: usize) -> String {
        let mut shown = String::with_capacity(text.len().min(limit));
        let mut rest = text;
        while let Some(character) = rest.chars().next() {
            let secret = self.0.iter().find(|secret| rest.starts_with(secret.as_str()));
            let (next, consumed) = match secret {
                Some(secret) => (HIDDEN, secret.len()),
                None => (&rest[..character.len_utf8()], character.len_utf8()),
            };
            if shown.len() + next.len() > limit {
                break;
            }
            shown.push_str(next);
            rest = &rest[consumed..];
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_hidden_even_where_the_text_is_cut() {
        let secrets = Secrets(vec!["pass-word".into(), "pass".into()]);
        assert_eq!(secrets.hide_in("a pass-word, a pass", 100), "a ***, a ***");
        assert_eq!(secrets.hide_in("a pass-word", 6), "a ***");
        assert_eq!(secrets.hide_in("a pass-word", 4), "a ");
        assert_eq!(secrets.hide_in("é pass", 3), "é ");
    }
}
