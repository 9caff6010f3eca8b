// SHA-256 of parts that follow each other, and the integers that the contract's digests are made of.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

// The 32 bytes.
std::string sha256(std::initializer_list<std::string_view> parts);

// The bytes of an unsigned integer, the least significant first.
template <typename Unsigned>
std::string little_endian(Unsigned value) {
  std::string bytes;
  for (unsigned i = 0; i < sizeof value; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xff);
  return bytes;
}
