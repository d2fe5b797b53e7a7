use clap::Subcommand;
use posthaste_api::{Definition, DefinitionIn, EventKey};
use uuid::Uuid;

use crate::client::{Client, Page};
use crate::output::{Output, Table, moment, say};

#[derive(Subcommand)]
pub enum DefinitionsCommand {
    /// List definitions
    List {
        #[command(flatten)]
        part: ListPart,
    },
    /// Show one definition
    Get {
        #[arg(value_parser = id)]
        id: Uuid,
    },
    /// Create a definition; a part of the key that is left out matches any value
    Create {
        #[command(flatten)]
        key: KeyFlags,
        /// Purpose of the definition
        #[arg(long)]
        description: Option<String>,
    },
    /// Change the given values, keep the others
    Update {
        #[arg(value_parser = id)]
        id: Uuid,
        #[command(flatten)]
        key: KeyFlags,
        /// Purpose of the definition
        #[arg(long)]
        description: Option<String>,
    },
    /// Delete a definition that no subscription uses
    Delete {
        #[arg(value_parser = id)]
        id: Uuid,
    },
}

/// Which events. In each part, * matches any value.
#[derive(clap::Args, Clone, Default)]
pub struct KeyFlags {
    /// Event type, such as order.placed
    #[arg(long = "event", value_name = "TYPE", visible_alias = "event-type")]
    pub event_type: Option<String>,
    /// Source service
    #[arg(long = "source", value_name = "SERVICE", visible_alias = "source-service")]
    pub source_service: Option<String>,
    /// Type of the resource that the event is about
    #[arg(long, value_name = "TYPE")]
    pub resource_type: Option<String>,
    /// Operation on the resource
    #[arg(long, value_name = "TYPE")]
    pub operation_type: Option<String>,
}

/// Which page of a list.
#[derive(clap::Args)]
pub struct ListPart {
    /// Number of the page, from 0
    #[arg(long)]
    page: Option<u32>,
    /// Entries per page
    #[arg(long)]
    size: Option<u32>,
    /// Cursor that the previous page printed, instead of --page
    #[arg(long, conflicts_with = "page")]
    cursor: Option<String>,
}

pub async fn run(command: DefinitionsCommand, client: &Client, output: Output) -> anyhow::Result<()> {
    match command {
        DefinitionsCommand::List { part } => {
            let page = client.definitions(&part.query()).await?;
            output.print(&page, list)?;
            say_total(&page);
        }
        DefinitionsCommand::Get { id } => output.print(&client.definition(id).await?.value, detail)?,
        DefinitionsCommand::Create { key, description } => {
            output.print(&client.create_definition(&key.definition(description)).await?, detail)?;
        }
        DefinitionsCommand::Update { id, key, description } => {
            let before = client.definition(id).await?;
            let after = key.over(&before.value.key).definition(description.or(before.value.description.clone()));
            output.print(&client.update_definition(&before, &after).await?, detail)?;
        }
        DefinitionsCommand::Delete { id } => {
            client.delete_definition(id).await?;
            say(format_args!("deleted definition {id}"));
        }
    }
    Ok(())
}

impl KeyFlags {
    pub fn is_empty(&self) -> bool {
        let Self { event_type, source_service, resource_type, operation_type } = self;
        [event_type, source_service, resource_type, operation_type].into_iter().all(Option::is_none)
    }

    /// The given flags; for each flag that is absent, the part of `key`.
    pub fn over(self, key: &EventKey) -> Self {
        Self {
            event_type: self.event_type.or_else(|| Some(key.event_type.clone())),
            source_service: self.source_service.or_else(|| Some(key.source_service.clone())),
            resource_type: self.resource_type.or_else(|| Some(key.resource_type.clone())),
            operation_type: self.operation_type.or_else(|| Some(key.operation_type.clone())),
        }
    }

    pub fn key(&self) -> EventKey {
        let Self { event_type, source_service, resource_type, operation_type } =
            self.clone().over(&EventKey::default());
        let part = Option::unwrap_or_default;
        EventKey {
            event_type: part(event_type),
            source_service: part(source_service),
            resource_type: part(resource_type),
            operation_type: part(operation_type),
        }
    }

    pub fn definition(self, description: Option<String>) -> DefinitionIn {
        DefinitionIn {
            source_service: self.source_service,
            event_type: self.event_type,
            resource_type: self.resource_type,
            operation_type: self.operation_type,
            description,
        }
    }
}

impl ListPart {
    pub fn query(&self) -> [(&'static str, Option<String>); 3] {
        [
            ("page", self.page.map(|page| page.to_string())),
            ("size", self.size.map(|size| size.to_string())),
            ("cursor", self.cursor.clone()),
        ]
    }
}

/// Parses an id as `list` prints it.
pub fn id(text: &str) -> Result<Uuid, String> {
    Uuid::parse_str(text).map_err(|_| "not an id: ids are UUIDs, and `list` shows them".to_owned())
}

/// Prints the total, so that a page is not mistaken for the whole list.
pub fn say_total<T>(page: &Page<T>) {
    let shown = page.items.len() as u64;
    if let Some(cursor) = &page.next_cursor {
        say(format_args!("{shown} of {}; the next page: --cursor {cursor}", page.total));
    } else if shown < page.total {
        say(format_args!("{shown} of {}, the last page", page.total));
    }
}

/// A key as tables show it, without the parts that match any value.
pub fn key_text(key: &EventKey) -> String {
    let parts = [("source", &key.source_service), ("resource", &key.resource_type), ("operation", &key.operation_type)];
    let specific = parts.into_iter().filter(|(_, part)| *part != posthaste_api::ANY);
    specific.fold(key.event_type.clone(), |text, (name, part)| format!("{text} {name}={part}"))
}

fn list(page: &Page<Definition>) -> Table {
    let mut table = Table::new(["ID", "EVENT", "SOURCE", "RESOURCE", "OPERATION", "DESCRIPTION"]);
    for Definition { id, key, description, .. } in &page.items {
        table.row([
            id.to_string(),
            key.event_type.clone(),
            key.source_service.clone(),
            key.resource_type.clone(),
            key.operation_type.clone(),
            description.clone().unwrap_or_default(),
        ]);
    }
    table
}

fn detail(definition: &Definition) -> Table {
    let Definition { id, key, description, created_at, updated_at } = definition;
    Table::of_fields([
        ("id", id.to_string()),
        ("event type", key.event_type.clone()),
        ("source service", key.source_service.clone()),
        ("resource type", key.resource_type.clone()),
        ("operation type", key.operation_type.clone()),
        ("description", description.clone().unwrap_or_default()),
        ("created", moment(*created_at)),
        ("updated", moment(*updated_at)),
    ])
}
