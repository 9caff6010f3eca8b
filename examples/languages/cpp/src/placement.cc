#include "placement.h"

#include <algorithm>
#include <cstdint>

#include "sha256.h"

namespace {

std::uint64_t score(const std::string& name, const std::string& capture_id) {
  const std::string digest =
      sha256({"residuum.store.v1", little_endian(static_cast<std::uint32_t>(name.size())), name, capture_id});
  std::uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value = value << 8 | static_cast<unsigned char>(digest[i]);
  return value;
}

}  // namespace

std::vector<residuum::v1::StoreAddress> ranked(
    const google::protobuf::RepeatedPtrField<residuum::v1::StoreAddress>& stores, const std::string& capture_id) {
  std::vector<residuum::v1::StoreAddress> order(stores.begin(), stores.end());
  std::ranges::sort(order, [&](const auto& a, const auto& b) {
    const auto left = score(a.name(), capture_id), right = score(b.name(), capture_id);
    return left != right ? left > right : a.name() < b.name();
  });
  return order;
}
