//! Throwaway real servers: started by the first test of a test binary that needs one, gone when that process ends.
//!
//! A server that is missing makes the test fail and says what to install; nothing is skipped.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::OnceCell;

/// A server whose life hangs on a pipe: when this process ends, however it ends, the shell that watches the pipe stops
/// the server and removes its data.
struct Server {
    port: u16,
    _watched: Child,
}

/// Waits for the end of its stdin, then cleans up. `$1` is the port.
const POSTGRES: &str = r#"
set -eu
bin=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -n 1)
[ -n "$bin" ] || { echo "PostgreSQL is not installed: run ./test, or apt-get install postgresql-15" >&2; exit 1; }
dir=$(mktemp -d /tmp/posthaste-postgres-XXXXXX)
as=
if [ "$(id -u)" = 0 ]; then chown postgres "$dir"; as="runuser -u postgres --"; fi
trap '$as "$bin/pg_ctl" -D "$dir/data" -m immediate stop >/dev/null 2>&1 || true; rm -rf "$dir"' EXIT
cd "$dir"
$as "$bin/initdb" -D "$dir/data" -U postgres -A trust -E UTF8 --locale=C.UTF-8 -N >"$dir/log" 2>&1 || { cat "$dir/log" >&2; exit 1; }
$as "$bin/pg_ctl" -D "$dir/data" -l "$dir/data/log" -w start -o "-p $1 -c listen_addresses=127.0.0.1 -c unix_socket_directories='' \
  -c max_connections=200 -c fsync=off -c synchronous_commit=off -c full_page_writes=off" >"$dir/log" 2>&1 || { cat "$dir/log" "$dir/data/log" >&2; exit 1; }
echo ready
cat >/dev/null
"#;

/// The URL of a new, empty database on a throwaway PostgreSQL. One server for a test binary, one database for a call.
pub async fn postgres() -> String {
    static SERVER: OnceCell<Server> = OnceCell::const_new();
    let server = SERVER.get_or_init(|| async { start(POSTGRES).await }).await;
    let name = database_name();
    let created = Command::new("psql")
        .args(["-h", "127.0.0.1", "-U", "postgres", "-q", "-c", &format!("CREATE DATABASE {name}")])
        .args(["-p", &server.port.to_string()])
        .output()
        .expect("the program psql is installed: run ./test, or apt-get install postgresql-client");
    assert!(created.status.success(), "{}", String::from_utf8_lossy(&created.stderr));
    format!("postgres://postgres@127.0.0.1:{}/{name}", server.port)
}

fn database_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    format!("test_{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

async fn start(script: &'static str) -> Server {
    let started = tokio::task::spawn_blocking(move || {
        let probe = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = probe.local_addr().expect("an address").port();
        drop(probe);
        let mut child = Command::new("sh")
            .args(["-c", script, "server", &port.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("stdout is piped");
        BufReader::new(stdout).read_line(&mut line).expect("the server's script answers");
        assert_eq!(line, "ready\n", "the server did not start: its message is above");
        Server { port, _watched: child }
    });
    started.await.expect("the server's script ran")
}
