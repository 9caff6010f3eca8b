#include "failure.h"

#include "google/rpc/status.pb.h"

namespace {

constexpr char kDomain[] = "residuum.dev";

std::string reason_of(const grpc::Status& status) {
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return "";
  for (const google::protobuf::Any& detail : details.details()) {
    google::rpc::ErrorInfo info;
    if (detail.UnpackTo(&info) && info.domain() == kDomain) return info.reason();
  }
  return "";
}

std::string describe(const grpc::Status& status) {
  const std::string reason = reason_of(status);
  return std::to_string(status.error_code()) + (reason.empty() ? "" : " (" + reason + ")") + ": " +
         status.error_message();
}

}  // namespace

CallError::CallError(const grpc::Status& status)
    : std::runtime_error(describe(status)), code_(status.error_code()), reason_(reason_of(status)) {}

void check(const grpc::Status& status) {
  if (!status.ok()) throw CallError(status);
}
