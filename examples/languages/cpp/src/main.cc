// Steers with the caller's vector, generates, follows the capture while it runs, and reads it again.
//
//   build/round VECTOR OUT [raw|fp32|fp16|bf16]
//
// VECTOR is a file of little-endian float32, as many as the model's hidden size. OUT is a folder. ../README.md
// describes the files in OUT, and the environment variables for the connection.

#include <bit>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <future>
#include <iomanip>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>
#include <nlohmann/json.hpp>

#include "connect.h"
#include "failure.h"
#include "placement.h"
#include "residuum/v1/inference.grpc.pb.h"
#include "residuum/v1/store.grpc.pb.h"
#include "rows.h"
#include "sha256.h"
#include "vector.h"

namespace v1 = residuum::v1;

namespace {

constexpr char kPrompt[] = "The most surprising thing about the ocean is";
constexpr std::uint32_t kMaxTokens = 64;
constexpr float kScale = 4;
constexpr std::chrono::seconds kCaptureWait{60};
constexpr std::chrono::seconds kUnaryTimeout = kCaptureWait + std::chrono::seconds{30};

const std::map<std::string, v1::Encoding> kEncodings = {
    {"raw", v1::ENCODING_RAW},
    {"fp32", v1::ENCODING_FP32},
    {"fp16", v1::ENCODING_FP16},
    {"bf16", v1::ENCODING_BF16},
};

// The inference service, and the way to it.
struct Inference {
  explicit Inference(const Settings& settings)
      : connection(settings, settings.endpoint), stub(v1::InferenceService::NewStub(connection.channel())) {}

  Connection connection;
  std::unique_ptr<v1::InferenceService::Stub> stub;
};

struct Store {
  Store(const Settings& settings, const std::string& endpoint)
      : connection(settings, endpoint), stub(v1::StoreService::NewStub(connection.channel())) {}

  Connection connection;
  std::unique_ptr<v1::StoreService::Stub> stub;
};

v1::LayerSelection layer_list(std::initializer_list<std::uint32_t> layers) {
  v1::LayerSelection selection;
  for (const std::uint32_t layer : layers) selection.mutable_list()->add_layers(layer);
  return selection;
}

v1::GetModelInfoResponse model_info(Inference& inference) {
  grpc::ClientContext context;
  inference.connection.prepare(context, kUnaryTimeout);
  v1::GetModelInfoResponse answer;
  check(inference.stub->GetModelInfo(&context, {}, &answer));
  return answer;
}

std::string hex(const std::string& bytes) {
  std::ostringstream text;
  for (const unsigned char byte : bytes) text << std::hex << std::setw(2) << std::setfill('0') << unsigned{byte};
  return text.str();
}

// Sends a vector. Throws if it is refused: the call is OK in that case, and the result has the reason.
void put_vector(Inference& inference, const v1::Vector& vector) {
  grpc::ClientContext context;
  inference.connection.prepare(context, kUnaryTimeout);
  v1::PutVectorsResponse answer;
  const auto writer = inference.stub->PutVectors(&context, &answer);
  v1::PutVectorsRequest request;
  *request.mutable_vector() = vector;
  writer->Write(request);  // false if the call has ended; Finish returns the reason
  writer->WritesDone();
  check(writer->Finish());
  for (const v1::PutVectorResult& result : answer.results()) {
    if (!result.has_error()) continue;
    throw std::runtime_error(v1::ErrorReason_Name(result.error().reason()) + ": vector " + hex(result.digest()) + ": " +
                             result.error().message());
  }
}

struct Registration {
  std::string request_id;
  int vectors_sent = 0;
};

// Registers a request that captures two layers and is steered after the first; sends the vector if it is missing.
Registration register_request(Inference& inference, const v1::GetModelInfoResponse& info, const v1::Vector& vector,
                              v1::Encoding encoding) {
  const std::uint32_t middle = info.num_layers() / 2, last = info.num_layers() - 1;
  v1::RegisterRequestRequest request;
  v1::CaptureSpec& capture = *request.mutable_spec()->mutable_capture();
  *capture.mutable_layers() = layer_list({middle, last});
  capture.set_encoding(encoding);
  v1::SteeringOperation& operation = *request.mutable_spec()->mutable_steering()->add_operations();
  *operation.mutable_layers() = layer_list({middle});
  operation.mutable_add()->set_digest(vector.digest());
  operation.mutable_add()->set_scale(kScale);

  grpc::ClientContext context;
  inference.connection.prepare(context, kUnaryTimeout);
  v1::RegisterRequestResponse answer;
  check(inference.stub->RegisterRequest(&context, request, &answer));
  Registration registration{answer.request_id()};
  if (!answer.missing_digests().empty()) {  // at most one: the request names only one vector
    put_vector(inference, vector);
    registration.vectors_sent = 1;
  }
  return registration;
}

// Reads chunks into `rows`; returns the last manifest, which lists the rows that count.
v1::CaptureManifest read_chunks(Store& store, grpc::ClientContext& context, const v1::ReadChunksRequest& request,
                                Rows& rows) {
  store.connection.prepare_stream(context);
  const auto reader = store.stub->ReadChunks(&context, request);
  v1::CaptureManifest manifest;
  v1::ReadChunksResponse response;
  while (reader->Read(&response)) {
    if (response.has_chunk()) {
      rows.add(response.chunk());
    } else if (response.has_manifest()) {
      manifest = response.manifest();
    }
  }
  check(reader->Finish());
  return manifest;
}

struct Reply {
  v1::CaptureHandle handle;
  std::vector<std::uint32_t> token_ids;
  std::string text;
  Rows followed;
  std::size_t rows_before_end = 0;  // rows that had arrived when the last token was generated
};

// Reads a generation to its end.
void generate(grpc::ClientReader<v1::GenerateResponse>& reader, Reply& reply) {
  bool finished = false;
  v1::GenerateResponse response;
  while (reader.Read(&response)) {
    if (response.has_delta()) {
      const v1::TokenDelta& delta = response.delta();
      reply.token_ids.insert(reply.token_ids.end(), delta.token_ids().begin(), delta.token_ids().end());
      reply.text += delta.text();
    } else if (response.has_finished()) {
      reply.rows_before_end = reply.followed.count();
      finished = true;
    }
  }
  check(reader.Finish());
  if (!finished) throw std::runtime_error("The generation broke off.");
}

// Generates, and follows the capture in another thread at the same time.
void generate_and_follow(Inference& inference, const Settings& settings, const std::string& request_id, Reply& reply) {
  v1::GenerateRequest request;
  request.set_request_id(request_id);
  request.set_text(kPrompt);
  request.mutable_sampling()->set_max_tokens(kMaxTokens);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_ignore_eos(true);

  grpc::ClientContext generating;
  inference.connection.prepare_stream(generating);
  const auto reader = inference.stub->Generate(&generating, request);
  v1::GenerateResponse first;
  if (!reader->Read(&first)) check(reader->Finish());
  if (!first.started().has_capture()) {
    generating.TryCancel();
    throw std::runtime_error("The generation did not begin with a capture.");
  }
  reply.handle = first.started().capture();

  Store store(settings, reply.handle.store_endpoint());
  grpc::ClientContext following;
  std::future<void> followed = std::async(std::launch::async, [&] {
    try {
      v1::ReadChunksRequest follow;
      follow.set_capture_id(reply.handle.capture_id());
      follow.set_follow(true);
      read_chunks(store, following, follow, reply.followed);
    } catch (...) {
      generating.TryCancel();  // without a follower, this example needs no generation
      throw;
    }
  });
  try {
    generate(*reader, reply);
  } catch (const CallError& error) {
    following.TryCancel();
    // If following failed first, it cancelled the generation, so report its error.
    if (error.code() == grpc::StatusCode::CANCELLED) followed.get();
    throw;
  } catch (...) {
    following.TryCancel();
    throw;
  }
  followed.get();
}

struct ReadCapture {
  v1::CaptureManifest manifest;
  Rows rows;
  std::vector<std::string> asked;
};

// Waits until a capture has ended, and reads it.
void read_from(const Settings& settings, const std::string& endpoint, const std::string& capture_id,
               ReadCapture& read) {
  Store store(settings, endpoint);
  v1::GetCaptureRequest request;
  request.set_capture_id(capture_id);
  request.mutable_wait()->set_seconds(kCaptureWait.count());
  grpc::ClientContext waiting;
  store.connection.prepare(waiting, kUnaryTimeout);
  v1::GetCaptureResponse answer;
  check(store.stub->GetCapture(&waiting, request, &answer));
  if (answer.manifest().state() != v1::CAPTURE_STATE_COMPLETE) {
    throw std::runtime_error("The capture is " + v1::CaptureState_Name(answer.manifest().state()) + ": " +
                             answer.manifest().incomplete_detail());
  }
  v1::ReadChunksRequest chunks;
  chunks.set_capture_id(capture_id);
  grpc::ClientContext reading;
  read.manifest = read_chunks(store, reading, chunks, read.rows);
}

// Reads a capture from its store. Stores are asked in the order of their ranks.
void read_again(const Settings& settings, const v1::GetModelInfoResponse& info, const std::string& capture_id,
                ReadCapture& read) {
  for (const v1::StoreAddress& address : ranked(info.stores(), capture_id)) {
    read.asked.push_back(address.name());
    try {
      read_from(settings, address.endpoint(), capture_id, read);
      return;
    } catch (const CallError& error) {
      if (error.code() != grpc::StatusCode::NOT_FOUND || error.reason() != "UNKNOWN_CAPTURE") throw;
    }
  }
  throw std::runtime_error("No store holds " + capture_id + ".");
}

void write(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  if (!(file << bytes && file.flush())) throw std::runtime_error(path.string() + " cannot be written.");
}

std::string little_endian_bytes(const std::vector<float>& values) {
  std::string bytes;
  bytes.reserve(values.size() * sizeof(float));
  for (const float value : values) bytes += little_endian(std::bit_cast<std::uint32_t>(value));
  return bytes;
}

void run(const std::string& vector_file, const std::filesystem::path& out, v1::Encoding encoding) {
  const Settings settings = Settings::from_environment();
  Inference inference(settings);
  const v1::GetModelInfoResponse info = model_info(inference);
  const v1::Vector vector = read_vector(vector_file, info.hidden_size());
  const Registration registration = register_request(inference, info, vector, encoding);
  Reply reply;
  generate_and_follow(inference, settings, registration.request_id, reply);
  ReadCapture read;
  read_again(settings, info, registration.request_id, read);
  const Shape shape = shape_of(read.manifest);

  std::filesystem::create_directories(out);
  write(out / "rows.f32", little_endian_bytes(read.rows.array(shape)));
  write(out / "followed.f32", little_endian_bytes(reply.followed.array(shape)));
  const auto& prompt = read.manifest.description().prompt_token_ids();
  const nlohmann::ordered_json summary = {
      {"request_id", registration.request_id},
      {"store", reply.handle.store()},
      {"asked", read.asked},
      {"state", v1::CaptureState_Name(read.manifest.state())},
      {"digest", hex(vector.digest())},
      {"vectors_sent", registration.vectors_sent},
      {"prompt_token_ids", std::vector(prompt.begin(), prompt.end())},
      {"generated_token_ids", reply.token_ids},
      {"text", reply.text},
      {"rows_before_end", reply.rows_before_end},
      {"layers", shape.layers},
      {"positions", shape.positions},
      {"width", shape.width},
  };
  write(out / "capture.json", summary.dump(2) + "\n");
  std::cout << shape.layers.size() << " layers × " << shape.positions.size() << " positions × " << shape.width << ":"
            << reply.text << "\n";
}

}  // namespace

int main(int count, char** arguments) {
  const auto encoding = kEncodings.find(count == 4 ? arguments[3] : "raw");
  if (count < 3 || count > 4 || encoding == kEncodings.end()) {
    std::cerr << "usage: round VECTOR OUT [raw|fp32|fp16|bf16]\n";
    return 2;
  }
  try {
    run(arguments[1], arguments[2], encoding->second);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
