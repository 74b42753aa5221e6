#!/usr/bin/env bash
# A container engine, and a base image that no registry is needed for: a minimal Debian made by debootstrap.
# Prints the base image's name. With BASE_IMAGE set, that is taken.
set -euo pipefail
install() {
    apt-get update -qq >&2
    apt-get install -y -qq --no-install-recommends "$@" >&2
}
if docker info >/dev/null 2>&1; then
    engine=docker
else
    engine=podman
    if ! command -v podman runc >/dev/null || ! [ -x /usr/lib/podman/aardvark-dns ]; then
        install podman buildah runc netavark aardvark-dns iptables
    fi
fi
command -v kubectl >/dev/null || install kubernetes-client # it renders the manifests
if [ -n "${BASE_IMAGE:-}" ]; then
    echo "$BASE_IMAGE"
    exit
fi
name=localhost/debian-minimal:latest
if ! "$engine" image inspect "$name" >/dev/null 2>&1; then
    command -v debootstrap >/dev/null || install debootstrap
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    # shellcheck source=/dev/null
    debootstrap --variant=minbase "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$folder" >&2
    tar --create --one-file-system --directory "$folder" . | "$engine" import - "$name" >&2
fi
echo "$name"
