# $1 is the port, $2 holds further settings.
set -eu
# Errors go to stdout: the test reads them and fails with them.
exec 2>&1

# Debian installs mariadbd in /usr/sbin, which only root has in its path.
PATH=$PATH:/usr/sbin
needs() { # program, package
  command -v "$1" >/dev/null || { echo "$1 is not installed: run ./test, or apt-get install $2"; exit 1; }
}
needs mariadbd mariadb-server-core
needs mariadb-install-db mariadb-server-core
needs mariadb mariadb-client-core
port=$1 settings=$2 as= pid=
# MariaDB runs as root only with this option.
if [ "$(id -u)" = 0 ]; then as=--user=root; fi

prepare() {
  dir=$(mktemp -d /tmp/posthaste-mariadb-XXXXXX)
  trap 'rm -rf "$dir"' EXIT
  # A server removes the temporary tables of others from a folder that they share.
  mkdir "$dir/tmp"
  export TMPDIR="$dir/tmp"
  mariadb-install-db --no-defaults $as --datadir="$dir/data" --auth-root-authentication-method=normal --skip-test-db \
    --skip-name-resolve >"$dir/log" 2>&1 || { cat "$dir/log"; exit 1; }
}

start() {
  [ -z "$pid" ] || { echo "the server has not been stopped"; exit 1; }
  mariadbd --no-defaults $as --datadir="$dir/data" --port="$port" --bind-address=127.0.0.1 --socket="$dir/socket" \
    --pid-file="$dir/pid" --skip-log-bin --skip-name-resolve --character-set-server=utf8mb4 --max-connections=300 \
    --performance-schema=OFF --innodb-buffer-pool-size=128M $settings >"$dir/log" 2>&1 &
  pid=$!
  # The check uses the socket in the server's own folder, so that no other server can answer. The server opens the
  # socket after the port.
  tries=600
  until mariadb --no-defaults -u root --socket="$dir/socket" -e 'SELECT 1' >/dev/null 2>&1; do
    tries=$((tries - 1))
    if [ "$tries" = 0 ] || ! kill -0 "$pid" 2>/dev/null; then cat "$dir/log"; exit 1; fi
    sleep 0.1
  done
}

# Crashes the server. Does nothing if the server is stopped.
stop() {
  [ -n "$pid" ] || return 0
  kill -9 "$pid" 2>/dev/null || true
  wait "$pid" 2>/dev/null || true
  pid=
}

# Stops as an administrator does.
shut_down() {
  kill "$pid"
  wait "$pid" 2>/dev/null || true
  pid=
}

