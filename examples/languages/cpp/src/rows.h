// Chunks as they come from the store, and float32 rows as they are wanted. The layouts are in capture.proto.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "residuum/v1/capture.pb.h"

// Which rows count: an array of them is [layers][positions][width].
struct Shape {
  std::vector<std::uint32_t> layers;
  std::vector<std::uint32_t> positions;
  std::size_t width = 0;
};

// Returns which rows count, as the manifest of a complete capture of one sequence and site says.
Shape shape_of(const residuum::v1::CaptureManifest& manifest);

// The rows of one sequence at one site, in whatever order they come. May be asked while another thread adds some.
class Rows {
 public:
  // How many rows there are.
  std::size_t count() const;

  // Takes the rows of a chunk. Throws std::runtime_error if it is damaged, or encoded in a way that is not decoded here.
  void add(const residuum::v1::Chunk& chunk);

  // Returns the rows of a shape as one array. Throws std::runtime_error if one did not come.
  std::vector<float> array(const Shape& shape) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<float>> rows_;  // by layer and position
};
