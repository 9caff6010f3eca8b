#include "connect.h"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace {

std::string environment(const char* name, const char* otherwise = "") {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

std::string contents(const std::string& path) {
  if (path.empty()) return "";
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!(text << file.rdbuf())) throw std::runtime_error(path + " cannot be read.");
  return text.str();
}

bool is_loopback(const std::string& endpoint) {
  const std::string host = endpoint.substr(0, endpoint.rfind(':'));
  const bool is_number = host.find_first_not_of("0123456789.") == std::string::npos;  // not 127.0.0.1.example
  return host == "localhost" || host == "[::1]" || (is_number && host.starts_with("127."));
}

std::shared_ptr<grpc::ChannelCredentials> credentials(const Settings& settings) {
  if (settings.tls_ca.empty()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = contents(settings.tls_ca);
  options.pem_cert_chain = contents(settings.client_cert);
  options.pem_private_key = contents(settings.client_key);
  return grpc::SslCredentials(options);
}

}  // namespace

Settings Settings::from_environment() {
  Settings settings;
  settings.endpoint = environment("RESIDUUM_ENDPOINT", "localhost:50051");
  settings.token = environment("RESIDUUM_TOKEN");
  settings.tls_ca = environment("RESIDUUM_TLS_CA");
  settings.tls_server_name = environment("RESIDUUM_TLS_SERVER_NAME");
  settings.client_cert = environment("RESIDUUM_CLIENT_CERT");
  settings.client_key = environment("RESIDUUM_CLIENT_KEY");
  settings.insecure = environment("RESIDUUM_INSECURE") == "1";
  return settings;
}

Connection::Connection(const Settings& settings, const std::string& endpoint) : token_(settings.token) {
  if (!token_.empty() && settings.tls_ca.empty() && !settings.insecure && !is_loopback(endpoint)) {
    throw std::runtime_error("The token would be sent to " + endpoint +
                             " in plain text. Set RESIDUUM_TLS_CA, or RESIDUUM_INSECURE=1 to send it.");
  }
  grpc::ChannelArguments arguments;
  if (!settings.tls_server_name.empty()) arguments.SetSslTargetNameOverride(settings.tls_server_name);
  channel_ = grpc::CreateCustomChannel(endpoint, credentials(settings), arguments);
}

void Connection::prepare_stream(grpc::ClientContext& context) const {
  if (!token_.empty()) context.AddMetadata("authorization", "Bearer " + token_);
}

void Connection::prepare(grpc::ClientContext& context, std::chrono::seconds timeout) const {
  prepare_stream(context);
  context.set_deadline(std::chrono::system_clock::now() + timeout);
}
