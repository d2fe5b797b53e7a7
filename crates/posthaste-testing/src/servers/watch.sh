
# The second half of a server's script; the first defines prepare, start and stop. Does what it is told on stdin, and when
# stdin ends (the test has ended, however it ended) stops the server and removes its data.

# Nobody may be left to read the answers: dash would die of the signal without cleaning up, while a failed echo ends it
# in order.
trap '' PIPE
# stdin belongs to the orders: nothing else may read from it.
prepare </dev/null
trap 'stop </dev/null >/dev/null 2>&1 || true; rm -rf "$dir"' EXIT
start </dev/null
echo done
while read -r order; do
  "$order" </dev/null
  echo done
done
