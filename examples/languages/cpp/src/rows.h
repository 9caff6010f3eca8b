// Decodes chunks into float32 rows. The layouts are in capture.proto.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "residuum/v1/capture.pb.h"

// The rows that count. An array of them is [layers][positions][width].
struct Shape {
  std::vector<std::uint32_t> layers;
  std::vector<std::uint32_t> positions;
  std::size_t width = 0;
};

// Returns the rows that count, from the manifest of a complete capture of one sequence and site.
Shape shape_of(const residuum::v1::CaptureManifest& manifest);

// The rows of one sequence at one site, in any order. Thread-safe.
class Rows {
 public:
  // The number of rows.
  std::size_t count() const;

  // Adds the rows of a chunk. Throws std::runtime_error if it is damaged or has an unsupported encoding.
  void add(const residuum::v1::Chunk& chunk);

  // Returns the rows of a shape as one array. Throws std::runtime_error if a row is missing.
  std::vector<float> array(const Shape& shape) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<float>> rows_;  // by layer and position
};
