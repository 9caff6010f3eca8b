#!/bin/sh
# Installs the examples' toolchains on Debian 12 or later, from Debian's packages (as root). Keeps an installed Node.js.
set -eu

apt-get update
node=
command -v node >/dev/null || node="nodejs npm"
# shellcheck disable=SC2086 # two packages, or none
apt-get install --yes --no-install-recommends $node \
	make protobuf-compiler libprotobuf-dev \
	golang-go protoc-gen-go protoc-gen-go-grpc golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev \
	g++ cmake libgrpc++-dev protobuf-compiler-grpc libboost-dev libssl-dev nlohmann-json3-dev
