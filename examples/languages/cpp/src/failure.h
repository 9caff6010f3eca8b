// What a failed call says: its gRPC code, and the reason of errors.proto, which programs act on.

#pragma once

#include <stdexcept>
#include <string>

#include <grpcpp/grpcpp.h>

// A call failed. what() is a line for a person: "5 (UNKNOWN_CAPTURE): ...", with the number of the gRPC code.
class CallError : public std::runtime_error {
 public:
  explicit CallError(const grpc::Status& status);

  grpc::StatusCode code() const { return code_; }

  // Why, such as "UNKNOWN_CAPTURE"; "" if the server did not say, because it was never reached.
  const std::string& reason() const { return reason_; }

 private:
  grpc::StatusCode code_;
  std::string reason_;
};

// Throws CallError unless the status is OK.
void check(const grpc::Status& status);
