use axum::extract::State;
use posthaste_api::{FieldError, Input, ReadFrom, ResetIn, ResetOut, TopicList, TopicRecords};
use posthaste_hub::READ_RECORDS;
use serde::Deserialize;

use crate::extract::{Body, Params, Segment};
use crate::problem::{Code, ErrorResponse};
use crate::router::App;

pub(crate) async fn list(State(app): State<App>) -> Result<axum::Json<TopicList>, ErrorResponse> {
    let topics = app.hub.topics().await;
    topics.map(axum::Json).map_err(|error| ErrorResponse::of_bus(&app.hub, &error))
}

pub(crate) async fn reset(
    State(app): State<App>,
    Body(reset): Body<ResetIn>,
) -> Result<axum::Json<ResetOut>, ErrorResponse> {
    let partitions = app.hub.reset_position(&reset).await;
    match partitions.map_err(|error| ErrorResponse::of_bus(&app.hub, &error))? {
        0 => {
            let detail = "the group does not read this partition: `posthaste topics lag` (GET /api/topics) shows which \
                          groups read which topics";
            Err(ErrorResponse::of(Code::NotFound, detail))
        }
        partitions => Ok(axum::Json(ResetOut { partitions })),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RecordsParams {
    from: Option<String>,
    limit: Option<usize>,
}

impl Input for RecordsParams {
    type Checked = (ReadFrom, usize);

    fn validate(self) -> Result<(ReadFrom, usize), Vec<FieldError>> {
        const DEFAULT_LIMIT: usize = 50;
        let mut errors = Vec::new();
        let limit = self.limit.unwrap_or(DEFAULT_LIMIT);
        if !(1..=READ_RECORDS).contains(&limit) {
            errors.push(FieldError::new("limit", format!("is {limit} and not 1 to {READ_RECORDS}")));
        }
        match self.from.map_or(Ok(ReadFrom::Earliest), |from| from.parse()) {
            Ok(from) if errors.is_empty() => Ok((from, limit)),
            Ok(_) => Err(errors),
            Err(error) => {
                errors.push(FieldError::new("from", error.to_string()));
                Err(errors)
            }
        }
    }
}

pub(crate) async fn records(
    State(app): State<App>,
    Segment(topic): Segment,
    Params((from, limit)): Params<RecordsParams>,
) -> Result<axum::Json<TopicRecords>, ErrorResponse> {
    let records = app.hub.topic_records(&topic, &from, limit).await;
    let records = records.map_err(|error| ErrorResponse::of_bus(&app.hub, &error))?;
    let not_found = || {
        ErrorResponse::of(
            Code::NotFound,
            "there is no such topic: `posthaste topics list` (GET /api/topics) lists them",
        )
    };
    records.map(axum::Json).ok_or_else(not_found)
}
