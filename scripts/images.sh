#!/bin/sh
# Build both container images with what is there: podman, buildah or docker. `make images` calls this.
#
# Variables:
#   REGISTRY     before the names, such as registry.example.com/me (default: none)
#   TAG          default: the version of this package
#   COMPILED     1: the gateway's hot path compiled to machine code (needs gcc, which is fetched)
#   TORCH_INDEX  a package index with CPU-only builds of torch; without it the engine's image has a CUDA build
#   BUILDER      one of the three, where there are several
#
# Exit codes: 0 built, 3 no builder that works, else the builder's own.
set -eu
cd "$(dirname "$0")/.."

works() {
    case "$1" in
        docker) docker info >/dev/null 2>&1 ;;  # its command alone builds nothing: a daemon does
        *) command -v "$1" >/dev/null 2>&1 ;;
    esac
}

if [ -z "${BUILDER:-}" ]; then
    for BUILDER in podman buildah docker none; do
        if [ "$BUILDER" = none ] || works "$BUILDER"; then break; fi
    done
elif ! works "$BUILDER"; then
    echo "BUILDER=$BUILDER does not work here" >&2
    exit 3
fi
if [ "$BUILDER" = none ]; then
    echo "no podman, no buildah, and no docker with a daemon that answers; on Debian: sudo apt-get install -y buildah" >&2
    exit 3
fi

TAG=${TAG:-$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/sumibi/__init__.py)}
prefix=${REGISTRY:+$REGISTRY/}

build() {  # NAME CONTAINERFILE [MORE...]
    name=$prefix$1:$TAG file=$2
    shift 2
    echo "building $name with $BUILDER"
    "$BUILDER" build --file "$file" --tag "$name" "$@" .
}

build sumibi deploy/Containerfile --build-arg "COMPILED=${COMPILED:-0}"
build sumibi-engine deploy/Containerfile.engine --build-arg "TORCH_INDEX=${TORCH_INDEX:-}"
