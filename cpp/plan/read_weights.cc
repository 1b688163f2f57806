// A plan's tensors, where they are stored, and the slices that devices hold of them.
#include <algorithm>

#include "base/memory_node.h"
#include "plan/reader.h"
#include "plan/stages.h"

namespace helm {
namespace {

bool in_one_piece(const TensorSource& source) {
  return source.extents.size() == 1 && source.extents[0].row_stride == 0;
}

void check_file(const JsonReader& node) {
  const std::string file = node.string();
  if (file.empty() || file.front() == '/' || ("/" + file + "/").find("/../") != std::string::npos) {
    node.reject("\"", file, "\" leaves the model directory");
  }
}

std::vector<int64_t> read_shape(const JsonReader& node) {
  if (node.size() != 1 && node.size() != 2) node.reject("expected one or two dimensions");
  std::vector<int64_t> shape;
  for (size_t i = 0; i < node.size(); ++i) shape.push_back(node[i].integer(1, kMaxExtent));
  if (shape.back() > kMaxWidth) node.reject("the last dimension exceeds ", kMaxWidth);
  const int64_t cols = shape.size() == 2 ? shape[1] : 1;
  if (shape[0] > kMaxOffset / cols) node.reject("there are more than 2^46 elements");
  return shape;
}

bool before(const SliceSpec& a, const SliceSpec& b) {
  return a.tensor != b.tensor ? a.tensor < b.tensor : a.device < b.device;
}

}  // namespace

void PlanReader::read_tensor(const JsonReader& node) {
  node.only({"name", "shape", "source", "part"});
  TensorSpec spec, whole;
  spec.name = node["name"].string();
  spec.shape = read_shape(node["shape"]);
  const JsonReader part = node["part"], source = node["source"];
  if (!part.is_null()) spec.part = read_part(part, spec);
  whole.shape = spec.part ? spec.part->shape : spec.shape;
  if (!source.is_null()) spec.source = read_source(source, whole);
  if (spec.part) check_cut_columns(node, spec);
  if (!tensor_index_.emplace(spec.name, static_cast<TensorIndex>(plan_.tensors.size())).second) {
    node["name"].reject("\"", spec.name, "\" is listed twice");
  }
  plan_.tensors.push_back(std::move(spec));
}

// A rectangle of another tensor, within it.
TensorPart PlanReader::read_part(const JsonReader& node, const TensorSpec& spec) {
  node.only({"tensor", "shape", "row", "col"});
  TensorPart part;
  part.tensor = node["tensor"].string();
  part.shape = read_shape(node["shape"]);
  if (part.shape.size() != spec.shape.size()) {
    node["shape"].reject("expected as many dimensions as the part has, ", spec.shape.size());
  }
  part.row = node["row"].integer(0, kMaxExtent);
  part.col = node["col"].integer(0, kMaxExtent);
  if (!spec.is_matrix() && part.col != 0) {
    node["col"].reject("expected 0, as a vector has no columns");
  }
  if (part.row + spec.rows() > part.shape[0]) {
    node["row"].reject("the part ends at row ", part.row + spec.rows(), ", \"", part.tensor,
                       "\" at ", part.shape[0]);
  }
  if (spec.is_matrix() && part.col + spec.cols() > part.shape[1]) {
    node["col"].reject("the part ends at column ", part.col + spec.cols(), ", \"", part.tensor,
                       "\" at ", part.shape[1]);
  }
  return part;
}

// Columns are cut where formats and blocks of files begin; the name says what was cut.
void PlanReader::check_cut_columns(const JsonReader& node, const TensorSpec& spec) {
  const TensorPart& part = *spec.part;
  const int64_t end = part.col + spec.cols();
  std::string name =
      part.tensor + "[" + std::to_string(part.row) + ":" + std::to_string(part.row + spec.rows());
  if (spec.is_matrix()) {
    const int64_t unit = !spec.source || is_dense(spec.source->stored) ? kBlockCols : kSpanCols;
    if (part.col % unit != 0) {
      node["part"]["col"].reject("columns of \"", part.tensor, "\" are cut at multiples of ", unit,
                                 ", not at ", part.col);
    }
    if (end % unit != 0 && end != part.shape[1]) {
      node["shape"].reject("columns of \"", part.tensor, "\" are cut at multiples of ", unit,
                           ", not at ", end);
    }
    name += ", " + std::to_string(part.col) + ":" + std::to_string(end);
  }
  name += "]";
  if (spec.name != name) node["name"].reject("expected \"", name, "\", found \"", spec.name, "\"");
}

TensorSource PlanReader::read_source(const JsonReader& node, const TensorSpec& spec) {
  node.only({"stored", "extents", "aux"});
  TensorSource source;
  source.stored = named(node["stored"], stored_from_name);
  if (is_pieces(source.stored)) return read_pieces(node, spec, source.stored);
  if (node.has("aux")) node["aux"].reject(stored_name(source.stored), " has no pieces");
  const int64_t block = row_of(source.stored).block_cols;
  if (spec.cols() % block != 0) {
    node["stored"].reject("rows of ", stored_name(source.stored), " have a multiple of ", block,
                          " columns, not ", spec.cols());
  }
  if (is_packed(source.stored) && !spec.is_matrix()) {
    node["stored"].reject("vectors are not stored as ", stored_name(source.stored));
  }
  const JsonReader extents = node["extents"];
  int64_t rows = 0;
  for (size_t i = 0; i < extents.size(); ++i) {
    source.extents.push_back(read_extent(extents[i], stored_bytes(source.stored, spec.cols())));
    rows += source.extents.back().rows;
  }
  if (rows != spec.rows()) {
    extents.reject("the rows add up to ", rows, ", the tensor has ", spec.rows());
  }
  if (is_packed(source.stored) && !in_one_piece(source)) {
    extents.reject("a matrix of ", stored_name(source.stored), " lies in one piece");
  }
  return source;
}

// Whether the pieces go together is told when they are opened.
TensorSource PlanReader::read_pieces(const JsonReader& node, const TensorSpec& spec,
                                     Stored stored) {
  constexpr size_t kMost = 8;
  if (!spec.is_matrix()) node["stored"].reject("vectors are not stored as ", stored_name(stored));
  if (node["extents"].size() > 0) node["extents"].reject("expected none beside pieces");
  TensorSource source{stored, {}, {}};
  const JsonReader aux = node["aux"];
  if (aux.size() < 1 || aux.size() > kMost) aux.reject("expected 1 to ", kMost, " pieces");
  for (size_t i = 0; i < aux.size(); ++i) source.aux.push_back(read_piece(aux[i]));
  for (const SourcePiece& piece : source.aux) {
    const auto same = [&](const SourcePiece& other) { return other.name == piece.name; };
    if (std::ranges::count_if(source.aux, same) > 1) aux.reject(piece.name, " is listed twice");
  }
  return source;
}

SourcePiece PlanReader::read_piece(const JsonReader& node) {
  node.only({"name", "dtype", "shape", "file", "offset"});
  SourcePiece piece;
  piece.name = node["name"].string();
  piece.dtype = node["dtype"].string();
  int64_t bytes = piece_element_bytes(piece.dtype);
  if (bytes == 0) node["dtype"].reject("no piece has elements \"", piece.dtype, "\"");
  const JsonReader shape = node["shape"];
  if (shape.size() > 2) shape.reject("expected at most two dimensions");
  for (size_t i = 0; i < shape.size(); ++i) {
    piece.shape.push_back(shape[i].integer(1, kMaxExtent));
    if (bytes > kMaxOffset / piece.shape.back()) shape.reject("exceeds 64 TiB");
    bytes *= piece.shape.back();
  }
  check_file(node["file"]);
  piece.file = node["file"].string();
  piece.offset = node["offset"].integer(0, kMaxOffset - bytes);
  return piece;
}

SourceExtent PlanReader::read_extent(const JsonReader& node, int64_t row_bytes) {
  node.only({"file", "offset", "rows", "row_stride"});
  SourceExtent extent{node["file"].string(), node["offset"].integer(0, kMaxOffset),
                      node["rows"].integer(1, kMaxExtent),
                      node["row_stride"].integer(0, kMaxOffset)};
  check_file(node["file"]);
  if (extent.row_stride > 0 && extent.row_stride < row_bytes) {
    node["row_stride"].reject("rows of ", row_bytes, " bytes overlap; expected 0 or as many");
  }
  const int64_t stride = std::max(extent.row_stride, row_bytes);
  if (extent.rows > (kMaxOffset - extent.offset) / stride) node.reject("ends beyond 64 TiB");
  return extent;
}

void PlanReader::read_slice(const JsonReader& node) {
  node.only({"tensor", "device", "format", "access", "node"});
  SliceSpec slice;
  slice.tensor = tensor(node["tensor"]);
  slice.device = device(node["device"]);
  slice.format = named(node["format"], format_from_name);
  const std::string access = node["access"].string();
  if (access == "mapped") {
    slice.access = SliceSpec::Access::kMapped;
  } else if (access == "disk") {
    slice.access = SliceSpec::Access::kDisk;
  } else if (access != "resident") {
    node["access"].reject("expected \"resident\", \"mapped\" or \"disk\", found \"", access, "\"");
  }
  if (node.has("node")) {
    const JsonReader where = node["node"];
    slice.node = static_cast<int>(where.integer(0, kMostNodes - 1));
    if (slice.device != kCpu || slice.access != SliceSpec::Access::kResident) {
      where.reject("only what is copied to the CPU's memory lies on a node");
    }
  }
  check_slice(node, slice);
  plan_.slices.push_back(slice);
}

// A slice by itself: its format goes with its tensor and device, and its access with its source.
void PlanReader::check_slice(const JsonReader& node, const SliceSpec& slice) const {
  const TensorSpec& spec = plan_.tensors[static_cast<size_t>(slice.tensor)];
  const JsonReader format = node["format"], access = node["access"];
  const char* name = format_name(slice.format);
  if (!spec.is_matrix() && slice.format != Format{}) {
    format.reject("vectors are held as f32, \"", spec.name, "\" as ", name);
  }
  if (!format_takes(slice.format, spec.cols())) {
    format.reject("no ", name, " has ", spec.cols(), " columns");
  }
  if (slice.device != kCpu && slice.format.codes == Codes::kBF16C) {
    format.reject("bf16c is a format of the CPU alone");
  }
  if (spec.source && !encodes(spec.source->stored, slice.format)) {
    format.reject("\"", spec.name, "\" is stored as ", stored_name(spec.source->stored), ", which ",
                  name, " does not hold; expected ", format_name(row_of(spec.source->stored).exact),
                  ", f32, f16, bf16, c8.s32 or c4.km32");
  }
  if (slice.access == SliceSpec::Access::kResident) return;
  if (slice.device != kCpu) access.reject("only the CPU reads what is mapped or on disk");
  if (slice.access == SliceSpec::Access::kDisk) check_disk_slice(access, slice);
  if (spec.part && spec.is_matrix() && spec.cols() != spec.part->shape[1]) {
    access.reject("\"", spec.name, "\" has some columns of its rows, which are not mapped");
  }
  if (!spec.source) return;  // bound from memory
  if (spec.part && is_packed(spec.source->stored) && spec.part->row % kStripRows != 0) {
    access.reject("\"", spec.name, "\" begins within ", kStripRows, " rows that lie together");
  }
  if (!in_one_piece(*spec.source)) {
    access.reject("\"", spec.name, "\" does not lie in one piece in its file");
  }
  if (!same_bytes(spec.source->stored, slice.format)) {
    access.reject("\"", spec.name, "\" is stored as ", stored_name(spec.source->stored), ", not ",
                  name);
  }
  const int64_t offset = spec.source->extents[0].offset;
  if (offset % mapped_alignment(spec.source->stored) != 0) {
    access.reject("\"", spec.name, "\" begins at ", offset, ", which is not aligned");
  }
}

// There is one slice for each tensor and device with an op that reads it, and none else. What an
// accelerator reads may lie in host memory instead.
void PlanReader::check_slices(const JsonReader& node) {
  const size_t devices = plan_.devices.size(), tensors = plan_.tensors.size();
  const auto name = [&](size_t d) { return "\"" + plan_.devices[d].name + "\""; };
  // By device, then tensor.
  std::vector<std::vector<bool>> read(devices, std::vector<bool>(tensors)), held = read,
                                                                            listed = read;
  for (size_t d = 0; d < devices; ++d) {
    const auto units = units_on(static_cast<DeviceIndex>(d), resident_units(plan_));
    for (const TensorIndex t : tensors_of(plan_, units)) read[d][static_cast<size_t>(t)] = true;
  }
  for (const SliceSpec& slice : plan_.slices) {
    listed[static_cast<size_t>(slice.device)][static_cast<size_t>(slice.tensor)] = true;
  }
  const auto visits = [&](size_t d, size_t t) {  // that device
    return d != kCpu && read[d][t] && !listed[d][t] && listed[kCpu][t];
  };
  int64_t bytes = 0;
  for (size_t i = 0; i < plan_.slices.size(); ++i) {
    const SliceSpec& slice = plan_.slices[i];
    const auto t = static_cast<size_t>(slice.tensor);
    const auto d = static_cast<size_t>(slice.device);
    const std::string what = "\"" + plan_.tensors[t].name + "\" on " + name(d);
    if (held[d][t]) node[i].reject(what, " is listed twice");
    bool wanted = read[d][t];
    for (size_t other = 1; d == kCpu && other < devices; ++other) {
      wanted = wanted || visits(other, t);
    }
    if (!wanted) node[i].reject("no op reads ", what);
    held[d][t] = true;
    bytes += plan_.own_bytes(slice);
    if (bytes > kMaxOffset) node.reject("the slices exceed 64 TiB");
  }
  for (size_t d = 0; d < devices; ++d) {
    for (size_t t = 0; t < tensors; ++t) {
      if (!read[d][t] || held[d][t] || visits(d, t)) continue;
      node.reject("an op reads \"", plan_.tensors[t].name, "\" on ", name(d),
                  ", where it has no slice");
    }
  }
  std::sort(plan_.slices.begin(), plan_.slices.end(), before);
}

// What visits the accelerator comes in a format that accelerators have.
void PlanReader::check_visiting_formats(const JsonReader& node) const {
  std::vector<bool> visiting = lacking_units(plan_);
  if (plan_.schedule.visit_tokens > 0) visiting = visits_of(plan_);
  for (const TensorIndex t : tensors_of(plan_, visiting)) {
    const SliceSpec* held = plan_.slice(t, kCpu);
    if (held == nullptr || held->format.codes != Codes::kBF16C) continue;
    node.reject("\"", plan_.tensors[static_cast<size_t>(t)].name,
                "\" visits the accelerator and cannot be bf16c there");
  }
}

}  // namespace helm
