#!/bin/sh
# `proto`: src/sumibi/gateway/epp/ext_proc.binpb from ext_proc.proto, by protoc.
# `messages`: tests/gateway/epp/messages.txt, made with Envoy's own protocol files (PyPI's xds-protos). Never
# install these where sumibi is: they take over other packages' top-level names.
set -eu
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch"
case "$1" in
proto)
    "$scratch/bin/pip" install --quiet grpcio-tools==1.71.2
    cd src/sumibi/gateway/epp
    "$scratch/bin/python" -m grpc_tools.protoc -I. --descriptor_set_out=ext_proc.binpb ext_proc.proto
    ;;
messages)
    "$scratch/bin/pip" install --quiet xds-protos==1.85.0
    "$scratch/bin/python" tests/gateway/epp/make_messages.py > tests/gateway/epp/messages.txt
    ;;
esac
