// Channels to both services. They use the same environment variables as residuum's own client.

#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <grpcpp/grpcpp.h>

struct Settings {
  std::string endpoint, token, tls_ca, tls_server_name, client_cert, client_key;
  bool insecure = false;

  static Settings from_environment();
};

// A channel, and the metadata of each call on it.
class Connection {
 public:
  // Makes a channel to either service, which connects with the first call. Throws std::runtime_error if the token
  // would be sent to another machine in plain text.
  Connection(const Settings& settings, const std::string& endpoint);

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }

  // Prepares the context of one call. A stream has no deadline: it lasts as long as the generation.
  void prepare_stream(grpc::ClientContext& context) const;
  void prepare(grpc::ClientContext& context, std::chrono::seconds timeout) const;

 private:
  std::shared_ptr<grpc::Channel> channel_;
  std::string token_;
};
