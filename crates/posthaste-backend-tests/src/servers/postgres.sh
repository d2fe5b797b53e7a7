# $1 is the port, $2 holds further settings.
set -eu
# Errors go to stdout: the test reads them and fails with them.
exec 2>&1

bin=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -n 1)
[ -n "$bin" ] || { echo "PostgreSQL is not installed: run ./test, or apt-get install postgresql"; exit 1; }
command -v psql >/dev/null || { echo "psql is not installed: run ./test, or apt-get install postgresql-client"; exit 1; }
port=$1 settings=$2 as=
# PostgreSQL refuses to run as root.
if [ "$(id -u)" = 0 ]; then as="runuser -u postgres --"; fi

prepare() {
  dir=$(mktemp -d /tmp/posthaste-postgres-XXXXXX)
  trap 'rm -rf "$dir"' EXIT
  if [ -n "$as" ]; then chown postgres "$dir"; fi
  cd "$dir"
  $as "$bin/initdb" -D "$dir/data" -U postgres -A trust -E UTF8 --locale=C.UTF-8 -N >"$dir/log" 2>&1 ||
    { cat "$dir/log"; exit 1; }
}

start() {
  $as "$bin/pg_ctl" -D "$dir/data" -l "$dir/data/log" -w start -o "-p $port -c listen_addresses=127.0.0.1 \
    -c unix_socket_directories='' -c max_connections=200 -c fsync=off $settings" >"$dir/log" 2>&1 ||
    { cat "$dir/log" "$dir/data/log"; exit 1; }
}

# Stops as in a crash: without a checkpoint and without waiting for clients. Does nothing if the server is stopped.
stop() {
  [ -e "$dir/data/postmaster.pid" ] || return 0
  $as "$bin/pg_ctl" -D "$dir/data" -m immediate -w stop >"$dir/log" 2>&1 || { cat "$dir/log"; return 1; }
}

# Stops as an administrator does: ends the clients' connections, and writes a checkpoint.
shut_down() {
  $as "$bin/pg_ctl" -D "$dir/data" -m fast -w stop >"$dir/log" 2>&1 || { cat "$dir/log"; return 1; }
}

