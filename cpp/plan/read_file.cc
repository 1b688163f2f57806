// The text of a plan, from a file or not, and what is often given in its place, named for what it
// is. Knows no field of a plan but its format.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "base/part_file.h"
#include "plan/reader.h"

namespace helm {
namespace {

constexpr size_t kMostBytes = size_t{64} << 20;  // many times what the largest plan takes

struct Sign {
  const char* mark;
  const char* what;
};

// How files begin.
constexpr Sign kBeginnings[] = {
    {"GGUF", "a GGUF file, a model's weights"},
    {"HELM-KV", "a saved KV cache"},
    {"PK\x03\x04", "an archive, such as PyTorch saves weights in"},
    {"version https://git-lfs", "a Git LFS pointer, which stands for a file"},
};

// Formats that HELM writes, and keys that only one kind of JSON has.
constexpr Sign kFormats[] = {
    {"helm-explanation", "the report of `helm-llm plan --json`"},
    {"helm-profile", "a machine's profile"},
};
constexpr Sign kKeys[] = {
    {"weight_map", "the index of a model's weights"},
    {"model_type", "a model's config.json"},
    {"architectures", "a model's config.json"},
    {"tokenizer_class", "a model's tokenizer_config.json"},
    {"added_tokens", "a model's tokenizer.json"},
    {"eos_token_id", "a model's generation_config.json"},
};

// A header of JSON behind its length, a little-endian word.
bool is_safetensors(std::string_view text) {
  constexpr size_t kWord = 8;
  if (text.size() <= kWord || text[kWord] != '{') return false;
  uint64_t length = 0;
  for (size_t i = kWord; i-- > 0;) length = length << 8 | static_cast<uint8_t>(text[i]);
  return length < uint64_t{1} << 32;
}

bool is_blank(std::string_view text) {
  return text.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

// What the text is by how it begins; null where it may be JSON.
const char* other_than_json(std::string_view text) {
  if (is_blank(text)) return "empty";
  for (const Sign& sign : kBeginnings) {
    if (text.starts_with(sign.mark)) return sign.what;
  }
  return is_safetensors(text) ? "a safetensors file, a model's weights" : nullptr;
}

// What the JSON is; null where it is a plan, or damaged.
const char* other_than_plan(const JsonReader& root) {
  const std::string format = root.has("format") ? root["format"].string() : "";
  if (format == kPlanFormat) return nullptr;
  for (const Sign& sign : kFormats) {
    if (format == sign.mark) return sign.what;
  }
  for (const Sign& sign : kKeys) {
    if (root.has(sign.mark)) return sign.what;
  }
  return "JSON without \"format\": \"helm-plan\"";
}

// `name`: of the file; empty for a text.
[[noreturn]] void refuse(const std::string& name, const char* what) {
  fail(ErrorKind::kInvalid, "[plan] ", name.empty() ? "this" : name, " is ", what,
       ", not a plan; write one with `helm-llm plan MODEL --write FILE`");
}

Plan read_plan(std::string_view text, const std::string& name) {
  if (const char* what = other_than_json(text)) refuse(name, what);
  const JsonDocument document(text, name.empty() ? "plan" : name, "not valid JSON");
  if (const char* what = other_than_plan(document.root())) refuse(name, what);
  return PlanReader().read(document.root());
}

[[noreturn]] void fail_to_read(const std::string& path) {
  fail(ErrorKind::kIo, "[plan] cannot read ", path.empty() ? "a file without a name" : path, ": ",
       std::strerror(errno), "; give a file of `helm-llm plan MODEL --write FILE`");
}

// All of it, or somewhat more than kMostBytes: what stands in a plan's place may be as large as a
// model.
std::string read_file(const std::string& path) {
  // Opening a pipe would wait for who writes to it.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status{};
  if (file.get() < 0 || fstat(file.get(), &status) != 0) fail_to_read(path);
  if (S_ISDIR(status.st_mode)) refuse(path, "a folder");
  std::string text;
  std::vector<char> part(size_t{1} << 16);
  while (text.size() <= kMostBytes) {
    const ssize_t got = ::read(file.get(), part.data(), part.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_to_read(path);
    if (got == 0) break;
    text.append(part.data(), static_cast<size_t>(got));
  }
  return text;
}

}  // namespace

Plan Plan::from_json(std::string_view json) {
  constexpr size_t kMostPath = 4096;
  if (!is_blank(json) && json.size() < kMostPath && json.find_first_of("{[\n") == json.npos) {
    fail(ErrorKind::kInvalid, "[plan] this is no JSON: \"", json,
         "\"; Plan::from_file() reads a file by its name");
  }
  return read_plan(json, "");
}

Plan Plan::from_file(const std::string& path) {
  const std::string text = read_file(path);
  if (text.size() > kMostBytes && other_than_json(text) == nullptr) refuse(path, "over 64 MiB");
  return read_plan(text, path);
}

}  // namespace helm
