#include "rows.h"

#include <bit>
#include <span>
#include <stdexcept>
#include <string>

#include <boost/crc.hpp>

namespace v1 = residuum::v1;

namespace {

using Crc32c = boost::crc_optimal<32, 0x1EDC6F41, 0xFFFFFFFF, 0xFFFFFFFF, true, true>;

std::uint32_t crc32c(const std::string& bytes) {
  Crc32c crc;
  crc.process_bytes(bytes.data(), bytes.size());
  return crc.checksum();
}

// The element type of a chunk's payload. RAW has the model's own type.
v1::DataType element_type(const v1::ChunkHeader& header) {
  switch (header.encoding()) {
    case v1::ENCODING_RAW:
      return header.dtype();
    case v1::ENCODING_FP32:
      return v1::DATA_TYPE_FLOAT32;
    case v1::ENCODING_FP16:
      return v1::DATA_TYPE_FLOAT16;
    case v1::ENCODING_BF16:
      return v1::DATA_TYPE_BFLOAT16;
    default:
      throw std::runtime_error("Rows encoded as " + v1::Encoding_Name(header.encoding()) + " are not supported here.");
  }
}

// The bits of the float32 that equals a binary16, given by its bits.
std::uint32_t float32_bits(std::uint32_t half) {
  const std::uint32_t sign = (half & 0x8000) << 16, exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
  if (exponent == 0x1f) return sign | 0x7f800000 | fraction << 13;  // infinity and NaN
  if (exponent != 0) return sign | (exponent + 112) << 23 | fraction << 13;
  if (fraction == 0) return sign;
  const std::uint32_t shift = std::countl_zero(fraction) - 21;  // subnormal: until the leading one is implied
  return sign | (113 - shift) << 23 | (fraction << shift & 0x3ff) << 13;
}

// Returns little-endian elements as float32, which holds every value of the narrower types exactly.
std::vector<float> decode(const std::string& payload, v1::DataType dtype) {
  const std::size_t size = dtype == v1::DATA_TYPE_FLOAT32 ? 4 : 2;
  if (payload.size() % size != 0) {
    throw std::runtime_error("A payload of " + std::to_string(payload.size()) + " bytes ends within a number.");
  }
  std::vector<float> values;
  values.reserve(payload.size() / size);
  for (std::size_t at = 0; at < payload.size(); at += size) {
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < size; ++i) bits |= std::uint32_t{static_cast<unsigned char>(payload[at + i])} << 8 * i;
    switch (dtype) {
      case v1::DATA_TYPE_FLOAT32:
        break;
      case v1::DATA_TYPE_BFLOAT16:
        bits <<= 16;  // it is the upper half of a float32
        break;
      case v1::DATA_TYPE_FLOAT16:
        bits = float32_bits(bits);
        break;
      default:
        throw std::runtime_error("Elements of type " + v1::DataType_Name(dtype) + " are not supported here.");
    }
    values.push_back(std::bit_cast<float>(bits));
  }
  return values;
}

}  // namespace

Shape shape_of(const v1::CaptureManifest& manifest) {
  if (manifest.present_size() != 1) {
    throw std::runtime_error("This example reads one sequence and site, but the capture has " +
                             std::to_string(manifest.present_size()) + ".");
  }
  const v1::RowSet& present = manifest.present(0);
  Shape shape{{present.layers().begin(), present.layers().end()}, {}, manifest.description().hidden_size()};
  for (const v1::RowRange& run : present.positions()) {
    for (std::uint32_t position = run.first(); position <= run.last(); ++position) shape.positions.push_back(position);
  }
  return shape;
}

std::size_t Rows::count() const {
  const std::lock_guard lock(mutex_);
  return rows_.size();
}

void Rows::add(const v1::Chunk& chunk) {
  const v1::ChunkHeader& header = chunk.header();
  const std::size_t width = header.width();
  if (header.layers().empty() || header.positions().empty() || width == 0) {
    throw std::runtime_error("A chunk has no layer, no position or no width.");
  }
  if (crc32c(chunk.payload()) != chunk.crc32c()) {
    throw std::runtime_error("A chunk's payload does not match its CRC-32C.");
  }
  const std::vector<float> values = decode(chunk.payload(), element_type(header));
  if (values.size() != width * header.layers_size() * header.positions_size()) {
    throw std::runtime_error("A chunk has " + std::to_string(values.size()) + " numbers for " +
                             std::to_string(header.layers_size()) + " × " + std::to_string(header.positions_size()) +
                             " rows of " + std::to_string(width) + ".");
  }
  const std::lock_guard lock(mutex_);
  std::span<const float> rest = values;
  for (const std::uint32_t layer : header.layers()) {
    for (const std::uint32_t position : header.positions()) {
      rows_[{layer, position}].assign(rest.begin(), rest.begin() + width);
      rest = rest.subspan(width);
    }
  }
}

std::vector<float> Rows::array(const Shape& shape) const {
  const std::lock_guard lock(mutex_);
  std::vector<float> values;
  values.reserve(shape.layers.size() * shape.positions.size() * shape.width);
  for (const std::uint32_t layer : shape.layers) {
    for (const std::uint32_t position : shape.positions) {
      const auto found = rows_.find({layer, position});
      if (found == rows_.end()) {
        throw std::runtime_error("The row of layer " + std::to_string(layer) + " at position " +
                                 std::to_string(position) + " is missing.");
      }
      values.insert(values.end(), found->second.begin(), found->second.end());
    }
  }
  return values;
}
