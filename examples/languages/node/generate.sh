#!/bin/sh
# Generates TypeScript from the contract into gen/ (not committed): `npm run generate`. Needs protoc with its protos.
set -eu

options=env=node # bytes are Buffers
options=$options,oneof=unions-value # { $case: "chunk", value: Chunk }: the compiler knows which one it is
options=$options,forceLong=bigint
options=$options,outputServices=grpc-js,outputPartialMethods=true,outputJsonMethods=false
options=$options,esModuleInterop=true,importSuffix=.js,useExactTypes=false

rm -rf gen
mkdir gen
protoc --plugin=node_modules/.bin/protoc-gen-ts_proto --ts_proto_out=gen --ts_proto_opt="$options" \
	-I../../../protos -I../protos \
	../../../protos/residuum/v1/*.proto ../protos/google/rpc/status.proto \
	google/protobuf/any.proto google/protobuf/duration.proto google/protobuf/timestamp.proto
