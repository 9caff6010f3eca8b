// The SHA-256 of concatenated parts, and integers as the contract's digests encode them.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

// Returns the digest, 32 bytes.
std::string sha256(std::initializer_list<std::string_view> parts);

// Returns the bytes of an unsigned integer, least significant first.
template <typename Unsigned>
std::string little_endian(Unsigned value) {
  std::string bytes;
  for (unsigned i = 0; i < sizeof value; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xff);
  return bytes;
}
