// Reading hostile JSON: every access is checked and every error names the path of the field.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "base/check.h"

namespace helm {

// A JSON value and where it stands, e.g. units[3].ops[1].out.
class JsonReader {
 public:
  // `subject` opens every message, e.g. "plan".
  JsonReader(const nlohmann::json& value, std::string subject, std::string path = "")
      : value_(value), subject_(std::move(subject)), path_(std::move(path)) {}

  template <typename... Parts>
  [[noreturn]] void reject(const Parts&... parts) const {
    fail(ErrorKind::kInvalid, "[", subject_, "] ", path_.empty() ? "top level" : path_, ": ",
         parts...);
  }

  JsonReader operator[](const char* key) const {
    if (!value_.is_object()) reject("expected an object, found ", value_.type_name());
    const auto it = value_.find(key);
    if (it == value_.end()) reject("key \"", key, "\" is missing");
    return {*it, subject_, path_.empty() ? key : path_ + "." + key};
  }

  JsonReader operator[](size_t index) const {
    return {value_.at(index), subject_, path_ + "[" + std::to_string(index) + "]"};
  }

  bool has(const char* key) const { return value_.is_object() && value_.contains(key); }
  bool is_null() const { return value_.is_null(); }

  // Length of an array.
  size_t size() const {
    if (!value_.is_array()) reject("expected an array, found ", value_.type_name());
    return value_.size();
  }

  int64_t integer(int64_t low, int64_t high) const {
    if (!value_.is_number_integer()) reject("expected an integer, found ", shown());
    const bool wide = value_.is_number_unsigned() && value_.get<uint64_t>() > uint64_t{INT64_MAX};
    if (wide || value_.get<int64_t>() < low || value_.get<int64_t>() > high) {
      reject("expected an integer from ", low, " to ", high, ", found ", shown());
    }
    return value_.get<int64_t>();
  }

  float number() const {
    if (!value_.is_number()) reject("expected a number, found ", shown());
    const auto number = static_cast<float>(value_.get<double>());
    if (!std::isfinite(number)) reject("expected a finite number, found ", shown());
    return number;
  }

  bool boolean() const {
    if (!value_.is_boolean()) reject("expected true or false, found ", shown());
    return value_.get<bool>();
  }

  std::string string() const {
    if (!value_.is_string()) reject("expected a string, found ", value_.type_name());
    return value_.get<std::string>();
  }

  // Rejects keys that the reader would otherwise silently ignore.
  void only(std::initializer_list<const char*> keys) const {
    if (!value_.is_object()) reject("expected an object, found ", value_.type_name());
    for (const auto& item : value_.items()) {
      bool known = false;
      for (const char* key : keys) known = known || item.key() == key;
      if (!known) reject("unknown key \"", item.key(), "\"");
    }
  }

 private:
  // Not what is inside of others, which may be nested more deeply than a stack can follow.
  std::string shown() const {
    if (value_.is_structured()) return value_.type_name();
    return value_.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }

  const nlohmann::json& value_;
  std::string subject_;
  std::string path_;
};

}  // namespace helm
