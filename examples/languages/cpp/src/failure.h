// Describes failed calls: the gRPC code, and the reason of errors.proto.

#pragma once

#include <stdexcept>
#include <string>

#include <grpcpp/grpcpp.h>

// A call failed. what() describes the error to the user: "5 (UNKNOWN_CAPTURE): ...", with the number of the gRPC code.
class CallError : public std::runtime_error {
 public:
  explicit CallError(const grpc::Status& status);

  grpc::StatusCode code() const { return code_; }

  // The reason, such as "UNKNOWN_CAPTURE"; "" if the call did not reach the server.
  const std::string& reason() const { return reason_; }

 private:
  grpc::StatusCode code_;
  std::string reason_;
};

// Throws CallError unless the status is OK.
void check(const grpc::Status& status);
