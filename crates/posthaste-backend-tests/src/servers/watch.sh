
# The second half of a server's script; the first half defines prepare, start and stop. Executes the commands on stdin.
# When stdin ends, because the test ended or was killed, it stops the server and removes its data.

# The test that reads the answers may be gone. SIGPIPE would kill dash without a cleanup, while a failed echo ends the
# script with its EXIT trap.
trap '' PIPE
# Only the loop below may read the commands from stdin.
prepare </dev/null
trap 'stop </dev/null >/dev/null 2>&1 || true; rm -rf "$dir"' EXIT
start </dev/null
echo done
while read -r order; do
  "$order" </dev/null
  echo done
done
