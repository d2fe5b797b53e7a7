# $1 is the port, $2 holds further lines of server.properties, separated by spaces. A space in a line is \u0020.
set -eu
# Errors go to stdout: the test reads them and fails with them.
exec 2>&1

libs=${POSTHASTE_TEST_SERVERS:-${XDG_CACHE_HOME:-$HOME/.cache}/posthaste-test-servers}/kafka-4.3.1
command -v java >/dev/null || { echo "java is not installed: run ./test, or apt-get install openjdk-17-jre-headless"; exit 1; }
ls "$libs"/kafka_*.jar >/dev/null 2>&1 || { echo "there is no Kafka in $libs: run ./test, which fetches it"; exit 1; }
# The port of the controller is below the range that the kernel gives to outgoing connections.
port=$1 settings=$2 controller=$(($1 - 12000)) pid=

prepare() {
  dir=$(mktemp -d /tmp/posthaste-kafka-XXXXXX)
  trap 'rm -rf "$dir"' EXIT
  cat >"$dir/log4j2.properties" <<END
rootLogger.level = INFO
rootLogger.appenderRef.stdout.ref = stdout
appender.stdout.type = Console
appender.stdout.name = stdout
appender.stdout.layout.type = PatternLayout
appender.stdout.layout.pattern = %d %p %m%n
END
  cat >"$dir/server.properties" <<END
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:$controller
listeners=PLAINTEXT://127.0.0.1:$port,CONTROLLER://127.0.0.1:$controller
advertised.listeners=PLAINTEXT://127.0.0.1:$port
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs=$dir/data
auto.create.topics.enable=false
delete.topic.enable=true
offsets.topic.num.partitions=3
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=3
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=100
END
  for line in $settings; do printf '%s\n' "$line" >>"$dir/server.properties"; done
  run kafka.tools.StorageTool format -t cG9zdGhhc3RlLXRlc3RzIQ -c "$dir/server.properties" >"$dir/log" 2>&1 ||
    { cat "$dir/log"; exit 1; }
}

run() {
  java -Xms256m -Xmx384m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dlog4j2.configurationFile="$dir/log4j2.properties" \
    -cp "$libs/*" "$@"
}

start() {
  [ -z "$pid" ] || { echo "the server has not been stopped"; exit 1; }
  java -Xms256m -Xmx384m -XX:+UseSerialGC -Dlog4j2.configurationFile="$dir/log4j2.properties" -cp "$libs/*" \
    kafka.Kafka "$dir/server.properties" >"$dir/log" 2>&1 &
  pid=$!
  # Its own log says that it serves the port, so that no other server can answer.
  tries=600
  until grep -q "Kafka Server started" "$dir/log"; do
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

# Stops as an administrator does.
shut_down() {
  kill "$pid"
  wait "$pid" 2>/dev/null || true
  pid=
}

