package main

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"os"

	pb "residuum.example/gen/residuumv1"
)

const float32Bytes = 4

// digestOf returns the digest of a float32 vector: the SHA-256 of the domain, the dtype, the length and the values. The
// rule is in tensor.proto.
func digestOf(values []byte) []byte {
	hash := sha256.New()
	hash.Write([]byte("residuum.vector.v1"))
	var head [12]byte
	binary.LittleEndian.PutUint32(head[:], uint32(pb.DataType_DATA_TYPE_FLOAT32))
	binary.LittleEndian.PutUint64(head[4:], uint64(len(values)/float32Bytes))
	hash.Write(head[:])
	hash.Write(values)
	return hash.Sum(nil)
}

// readVector reads a vector from a file of little-endian float32, the form in which it is sent.
func readVector(path string, length int) (*pb.Vector, error) {
	values, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if len(values) != length*float32Bytes {
		return nil, fmt.Errorf("%s has %d bytes; a vector for this model is %d float32, %d bytes",
			path, len(values), length, length*float32Bytes)
	}
	return &pb.Vector{Digest: digestOf(values), Dtype: pb.DataType_DATA_TYPE_FLOAT32, Values: values}, nil
}
