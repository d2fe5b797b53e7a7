use posthaste_core::outbox::TableName;

/// Fills the name of a table into a statement. Where `{table}` stands alone the name is quoted, so that a word that SQL
/// reserves (`order`, `user`) is a name all the same. `{table}_owner`, the name of an index and the like are no words of SQL.
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
