use posthaste_core::outbox::TableName;

/// Fills the name of a table into a statement. `{table}` on its own is quoted, so that a reserved word of SQL (`order`,
/// `user`) works as a name. Names such as `{table}_owner` are not quoted, because they are never reserved words.
pub(crate) fn fill_table(template: &str, table: &TableName, quote: char) -> String {
    let (name, beginning) = (format!("{quote}{table}{quote}"), format!("{table}_"));
    template.replace("{table}_", &beginning).replace("{table}", &name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_quoted_where_it_stands_alone() {
        let table = TableName::new("order").unwrap();
        let template =
            "SELECT 1 FROM {table} AS item INDEXED BY {table}_key WHERE {table}.seq = (SELECT 1 FROM {table}_owner)";
        assert_eq!(
            fill_table(template, &table, '"'),
            "SELECT 1 FROM \"order\" AS item INDEXED BY order_key WHERE \"order\".seq = (SELECT 1 FROM order_owner)"
        );
    }
}
