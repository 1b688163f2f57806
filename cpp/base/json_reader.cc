#include "base/json_reader.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

namespace helm {

using nlohmann::json;

JsonReader::JsonReader(const json& value, std::string subject, std::string path)
    : value_(value), subject_(std::move(subject)), path_(std::move(path)) {}

JsonReader JsonReader::operator[](const std::string& key) const {
  if (!value_.is_object()) reject("expected an object, found ", value_.type_name());
  const auto it = value_.find(key);
  if (it == value_.end()) reject("key \"", key, "\" is missing");
  return {*it, subject_, path_.empty() ? key : path_ + "." + key};
}

JsonReader JsonReader::operator[](size_t index) const {
  return {value_.at(index), subject_, path_ + "[" + std::to_string(index) + "]"};
}

bool JsonReader::has(const std::string& key) const {
  return value_.is_object() && value_.contains(key);
}

bool JsonReader::is_null() const {
  return value_.is_null();
}

size_t JsonReader::size() const {
  if (!value_.is_array()) reject("expected an array, found ", value_.type_name());
  return value_.size();
}

std::vector<std::string> JsonReader::names() const {
  if (!value_.is_object()) reject("expected an object, found ", value_.type_name());
  std::vector<std::string> names;
  for (const auto& item : value_.items()) names.push_back(item.key());
  return names;
}

int64_t JsonReader::integer(int64_t low, int64_t high) const {
  if (!value_.is_number_integer()) reject("expected an integer, found ", shown());
  const bool wide = value_.is_number_unsigned() && value_.get<uint64_t>() > uint64_t{INT64_MAX};
  if (wide || value_.get<int64_t>() < low || value_.get<int64_t>() > high) {
    reject("expected an integer from ", low, " to ", high, ", found ", shown());
  }
  return value_.get<int64_t>();
}

float JsonReader::number() const {
  if (!value_.is_number()) reject("expected a number, found ", shown());
  const auto number = static_cast<float>(value_.get<double>());
  if (!std::isfinite(number)) reject("expected a finite number, found ", shown());
  return number;
}

bool JsonReader::boolean() const {
  if (!value_.is_boolean()) reject("expected true or false, found ", shown());
  return value_.get<bool>();
}

std::string JsonReader::string() const {
  if (!value_.is_string()) reject("expected a string, found ", value_.type_name());
  return value_.get<std::string>();
}

void JsonReader::only(std::initializer_list<const char*> keys) const {
  if (!value_.is_object()) reject("expected an object, found ", value_.type_name());
  for (const auto& item : value_.items()) {
    bool known = false;
    for (const char* key : keys) known = known || item.key() == key;
    if (!known) reject("unknown key \"", item.key(), "\"");
  }
}

// Not what is inside of others, which may be nested more deeply than a stack can follow.
std::string JsonReader::shown() const {
  if (value_.is_structured()) return value_.type_name();
  return value_.dump(-1, ' ', false, json::error_handler_t::replace);
}

JsonDocument::JsonDocument(std::string_view text, std::string subject, const std::string& complaint)
    : subject_(std::move(subject)) {
  try {
    value_ = std::make_unique<const json>(json::parse(text));
  } catch (const json::exception& error) {
    const std::string why = error.what();  // "[json.exception.parse_error.101] parse error at ..."
    fail(ErrorKind::kInvalid, "[", subject_, "] ", complaint, ": ", why.substr(why.find("] ") + 2));
  }
}

JsonDocument::~JsonDocument() = default;

JsonReader JsonDocument::root() const {
  return {*value_, subject_, ""};
}

}  // namespace helm
