#!/usr/bin/env bash
# Makes the base image of the end-to-end tests, a minimal Debian, without a registry. Prints the image's name.
# Installs podman and debootstrap on Debian if they are missing. With BASE_IMAGE set, only prints that.
set -euo pipefail
cd "$(dirname "$0")"
export CONTAINERS_CONF="$PWD/containers.conf"
missing=()
command -v podman >/dev/null && command -v runc >/dev/null || missing+=(podman buildah runc)
[ -x /usr/lib/podman/aardvark-dns ] || missing+=(netavark aardvark-dns iptables)
command -v debootstrap >/dev/null || missing+=(debootstrap)
if ((${#missing[@]})); then
    apt-get update -qq >&2
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
fi
name=${BASE_IMAGE:-localhost/debian-minimal:latest}
if ! podman image exists "$name"; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    # shellcheck source=/dev/null
    debootstrap --variant=minbase --include=ca-certificates "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$folder" >&2
    # The build trusts the same certificate authorities as this machine, a private one included.
    cp --dereference /etc/ssl/certs/ca-certificates.crt "$folder/etc/ssl/certs/"
    tar --create --one-file-system --directory "$folder" . | podman import - "$name" >&2
fi
echo "$name"
