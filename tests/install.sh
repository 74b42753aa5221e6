#!/usr/bin/env bash
# Install what `make check` needs of the system: kubectl renders the manifests.
set -euo pipefail
command -v kubectl >/dev/null && exit 0
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "error: make check needs kubectl >= 1.27; install it, or run as root on Debian 13" >&2
    exit 2
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends kubernetes-client
