#!/bin/sh
# Installs what debian-packages.txt lists and this Debian lacks, as root; for anyone else it says what to type.
set -eu
wanted=$(sed 's/#.*//' "$(dirname "$0")/debian-packages.txt" | xargs)
if ! command -v dpkg-query >/dev/null; then
    echo "This is no Debian: install what brings libaio with its headers, a C++ compiler and Python's headers ($wanted)."
    exit 0
fi
missing=
for name in $wanted; do
    state=$(dpkg-query --show --showformat '${db:Status-Status}' "$name" 2>/dev/null) || state=
    [ "$state" = installed ] || missing="$missing $name"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ]; then
    echo "Missing:$missing. Type: sudo apt-get install$missing" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086 - names, one word each
apt-get install -qq --yes --no-install-recommends $missing
