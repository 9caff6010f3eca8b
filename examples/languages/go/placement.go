package main

import (
	"crypto/sha256"
	"encoding/binary"
	"sort"

	pb "residuum.example/gen/residuumv1"
)

// score returns the rank score of a store for a capture. The rule is in placement.proto.
func score(name, captureID string) uint64 {
	hash := sha256.New()
	hash.Write([]byte("residuum.store.v1"))
	var length [4]byte
	binary.LittleEndian.PutUint32(length[:], uint32(len(name)))
	hash.Write(length[:])
	hash.Write([]byte(name + captureID))
	return binary.BigEndian.Uint64(hash.Sum(nil))
}

// ranked returns the stores in the order in which a reader asks them for a capture: the highest score first.
func ranked(stores []*pb.StoreAddress, captureID string) []*pb.StoreAddress {
	order := append([]*pb.StoreAddress(nil), stores...)
	sort.Slice(order, func(i, j int) bool {
		a, b := order[i].GetName(), order[j].GetName()
		if left, right := score(a, captureID), score(b, captureID); left != right {
			return left > right
		}
		return a < b
	})
	return order
}
