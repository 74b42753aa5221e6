#!/usr/bin/env bash
# Installs what `make check` needs of the system: kubectl renders the manifests (Debian 13's is new enough; on Debian 12 it
# has to be there), `ip` makes the networks that are cut, Chromium opens the documentation and the report.
# With `look`, it only says whether that can be done.
set -euo pipefail
missing=()
command -v kubectl >/dev/null || missing+=(kubernetes-client)
command -v ip >/dev/null || missing+=(iproute2)
{ command -v chromium && command -v chromedriver; } >/dev/null || missing+=(chromium chromium-driver fonts-dejavu-core)
if ((${#missing[@]} == 0)); then
    exit 0
fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "error: make check needs ${missing[*]}: install them, or run it as root on Debian" >&2
    exit 2
fi
if [[ ${1:-} == look ]]; then
    exit 0
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}"
