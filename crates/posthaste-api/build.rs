//! Compiles the Protobuf contract without `protoc`.

use std::error::Error;

const FOLDER: &str = "proto";
const CONTRACT: [&str; 3] =
    ["posthaste/v1/events.proto", "posthaste/v1/event_hub.proto", "posthaste/v1/subscriptions.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={FOLDER}");
    let descriptors = protox::compile(CONTRACT, [FOLDER])?;
    prost_build::Config::new().bytes(["."]).compile_fds(descriptors)?;
    Ok(())
}
