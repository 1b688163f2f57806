// Reading hostile JSON: every access is checked and every error names the path of the field.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"

namespace helm {

// A JSON value and where it stands, e.g. units[3].ops[1].out. The document must outlive it.
class JsonReader {
 public:
  template <typename... Parts>
  [[noreturn]] void reject(const Parts&... parts) const {
    fail(ErrorKind::kInvalid, "[", subject_, "] ", path_.empty() ? "top level" : path_, ": ",
         parts...);
  }

  JsonReader operator[](const std::string& key) const;
  JsonReader operator[](size_t index) const;
  bool has(const std::string& key) const;
  bool is_null() const;
  size_t size() const;                     // length of an array
  std::vector<std::string> names() const;  // keys of an object
  int64_t integer(int64_t low, int64_t high) const;
  float number() const;  // finite
  bool boolean() const;
  std::string string() const;
  // Rejects keys that the reader would otherwise silently ignore.
  void only(std::initializer_list<const char*> keys) const;

 private:
  friend class JsonDocument;
  JsonReader(const nlohmann::json& value, std::string subject, std::string path);
  std::string shown() const;

  const nlohmann::json& value_;
  std::string subject_;
  std::string path_;
};

// A text that has been parsed. `subject` opens every message, e.g. "plan".
class JsonDocument {
 public:
  // Throws Error{kInvalid} that says `complaint`, and why, where the text is not JSON.
  JsonDocument(std::string_view text, std::string subject, const std::string& complaint);
  ~JsonDocument();
  JsonDocument(const JsonDocument&) = delete;
  JsonDocument& operator=(const JsonDocument&) = delete;
  JsonReader root() const;

 private:
  std::unique_ptr<const nlohmann::json> value_;
  std::string subject_;
};

}  // namespace helm
