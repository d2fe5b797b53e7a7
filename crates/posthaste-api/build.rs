//! Compiles the Protobuf contract without `protoc`.

use std::error::Error;

const CONTRACT: &str = "proto/posthaste/v1/events.proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={CONTRACT}");
    let descriptors = protox::compile([CONTRACT], ["proto"])?;
    prost_build::Config::new().bytes(["."]).compile_fds(descriptors)?;
    Ok(())
}
