#include "sha256.h"

#include <memory>
#include <stdexcept>

#include <openssl/evp.h>

std::string sha256(std::initializer_list<std::string_view> parts) {
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  std::string digest(EVP_MD_size(EVP_sha256()), '\0');
  bool good = context && EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr);
  for (const std::string_view part : parts) good = good && EVP_DigestUpdate(context.get(), part.data(), part.size());
  auto* out = reinterpret_cast<unsigned char*>(digest.data());
  if (!good || !EVP_DigestFinal_ex(context.get(), out, nullptr)) throw std::runtime_error("SHA-256 failed.");
  return digest;
}
