#include "vector.h"

#include <cstdint>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "sha256.h"

namespace {

constexpr std::size_t kFloat32Bytes = 4;

}  // namespace

std::string digest_of(const std::string& values) {
  return sha256({"residuum.vector.v1", little_endian<std::uint32_t>(residuum::v1::DATA_TYPE_FLOAT32),
                 little_endian<std::uint64_t>(values.size() / kFloat32Bytes), values});
}

residuum::v1::Vector read_vector(const std::string& path, std::size_t length) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read.");
  const std::string values{std::istreambuf_iterator<char>(file), {}};
  if (values.size() != length * kFloat32Bytes) {
    throw std::runtime_error(path + " has " + std::to_string(values.size()) + " bytes; a vector for this model is " +
                             std::to_string(length) + " float32, " + std::to_string(length * kFloat32Bytes) +
                             " bytes.");
  }
  residuum::v1::Vector vector;
  vector.set_digest(digest_of(values));
  vector.set_dtype(residuum::v1::DATA_TYPE_FLOAT32);
  vector.set_values(values);
  return vector;
}
