// Steering vectors and their digests. The rule is in tensor.proto.

#pragma once

#include <cstddef>
#include <string>

#include "residuum/v1/tensor.pb.h"

// The digest of a float32 vector, given by its little-endian bytes: the SHA-256 of the domain, the dtype, the length and
// the values.
std::string digest_of(const std::string& values);

// Reads a vector from a file of little-endian float32, the form in which it is sent. Throws std::runtime_error if it has
// another length.
residuum::v1::Vector read_vector(const std::string& path, std::size_t length);
