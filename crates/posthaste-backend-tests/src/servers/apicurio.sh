# $1 is the port, $2 is not used.
set -eu
# Errors go to stdout: the test reads them and fails with them.
exec 2>&1

home=${POSTHASTE_TEST_SERVERS:-${XDG_CACHE_HOME:-$HOME/.cache}/posthaste-test-servers}/apicurio-3.0.9
jar=$home/apicurio-registry-app-3.0.9-runner.jar
command -v java >/dev/null || { echo "java is not installed: run ./test, or apt-get install openjdk-17-jre-headless"; exit 1; }
[ -e "$jar" ] || { echo "there is no Apicurio Registry in $home: run ./test, which fetches it"; exit 1; }
port=$1 pid=

prepare() {
  dir=$(mktemp -d /tmp/posthaste-apicurio-XXXXXX)
  trap 'rm -rf "$dir"' EXIT
}

# Its schemas are in memory.
start() {
  [ -z "$pid" ] || { echo "the server has not been stopped"; exit 1; }
  java -Xmx512m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Djava.io.tmpdir="$dir" -Dquarkus.http.host=127.0.0.1 \
    -Dquarkus.http.port="$port" '-Dquarkus.log.category."io.quarkus".level=INFO' -jar "$jar" >"$dir/log" 2>&1 &
  pid=$!
  # Its own log says that it serves the port, so that no other server can answer.
  tries=600
  until grep -q "Listening on" "$dir/log"; do
    tries=$((tries - 1))
    if [ "$tries" = 0 ] || ! kill -0 "$pid" 2>/dev/null; then tail -50 "$dir/log"; exit 1; fi
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

