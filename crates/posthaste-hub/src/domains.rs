use posthaste_api::Domain;
use posthaste_api::proto::EventHubEvent;

use crate::settings::{RoutingRule, RoutingSettings};

/// The domain of an event: the first rule that matches, or the default.
pub(crate) fn domain_of(settings: &RoutingSettings, event: &EventHubEvent) -> Domain {
    let rule = settings.rules.iter().find(|rule| applies(rule, event));
    rule.map_or(settings.default_domain, |rule| rule.domain)
}

fn applies(rule: &RoutingRule, event: &EventHubEvent) -> bool {
    let fits = |pattern: &Option<String>, value: &str| pattern.as_ref().is_none_or(|pattern| fits(pattern, value));
    fits(&rule.resource_type, event.resource_type.as_deref().unwrap_or(""))
        && fits(&rule.operation_type, event.operation_type.as_deref().unwrap_or(""))
        && fits(&rule.event_type, &event.event_type)
}

/// True if the pattern matches the whole value; `*` matches any run of characters.
fn fits(pattern: &str, value: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else {
        return pattern == value;
    };
    let Some(mut value) = value.strip_prefix(head) else {
        return false;
    };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let tail = parts.pop().unwrap_or("");
    for part in parts {
        match value.find(part) {
            Some(at) => value = &value[at + part.len()..],
            None => return false,
        }
    }
    value.ends_with(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_matches_any_run_of_characters() {
        for (pattern, value) in [("*", ""), ("*", "x"), ("user.*", "user.created"), ("*.created", "user.created")] {
            assert!(fits(pattern, value), "{pattern} {value}");
        }
        assert!(fits("a*b*c", "a-b-b-c") && fits("exact", "exact"));
        for (pattern, value) in [("user.*", "users"), ("*.created", "created"), ("a*b*c", "a-c"), ("exact", "exactly")]
        {
            assert!(!fits(pattern, value), "{pattern} {value}");
        }
    }

    #[test]
    fn the_first_rule_that_matches_wins() {
        let rule = |event_type: &str, domain| RoutingRule {
            resource_type: None,
            operation_type: None,
            event_type: Some(event_type.to_owned()),
            domain,
        };
        let settings = RoutingSettings {
            default_domain: Domain::Organization,
            rules: vec![rule("user.session.*", Domain::AccessSession), rule("user.*", Domain::UserLifecycle)],
        };
        let domain = |event_type: &str| {
            domain_of(&settings, &EventHubEvent { event_type: event_type.to_owned(), ..EventHubEvent::default() })
        };
        assert_eq!(domain("user.session.opened"), Domain::AccessSession);
        assert_eq!(domain("user.created"), Domain::UserLifecycle);
        assert_eq!(domain("order.placed"), Domain::Organization);
    }
}
