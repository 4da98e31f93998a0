package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// The kinds of findings that need the cluster's list.
const (
	withoutVolume           = "pv-without-volume"
	withoutPersistentVolume = "volume-without-pv"
	ofAnotherNode           = "pv-of-another-node"
	ofAnotherPool           = "pv-of-another-pool"
)

// persistentVolume has the fields that this command reads. Kubernetes' own types are not linked for
// so few fields.
type persistentVolume struct {
	Kind     string `json:"kind"` // empty in a PersistentVolumeList
	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		CSI *struct {
			Driver       string `json:"driver"`
			VolumeHandle string `json:"volumeHandle"`
		} `json:"csi"`
		ClaimRef *struct {
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
		} `json:"claimRef"`
		NodeAffinity *struct {
			Required *struct {
				NodeSelectorTerms []struct {
					MatchExpressions []struct {
						Key      string   `json:"key"`
						Operator string   `json:"operator"`
						Values   []string `json:"values"`
					} `json:"matchExpressions"`
				} `json:"nodeSelectorTerms"`
			} `json:"required"`
		} `json:"nodeAffinity"`
	} `json:"spec"`
}

// readPersistentVolumes reads the output of `kubectl get pv -o json`.
func readPersistentVolumes(stdin io.Reader, path string) ([]persistentVolume, error) {
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("--persistent-volumes: %w", err)
		}
		defer f.Close()
		stdin = f
	}
	b, err := io.ReadAll(stdin)
	if err != nil {
		return nil, fmt.Errorf("--persistent-volumes %s: %w", path, err)
	}
	list, err := parsePersistentVolumes(b)
	if err != nil {
		return nil, fmt.Errorf("--persistent-volumes %s: this is not the output of `kubectl get pv -o json`: %w", path, err)
	}
	return list, nil
}

// parsePersistentVolumes parses a list of all PersistentVolumes. It refuses a list that is marked
// as partial: the volumes of missing PersistentVolumes would seem to be unused.
func parsePersistentVolumes(b []byte) ([]persistentVolume, error) {
	var list struct {
		Kind     string `json:"kind"`
		Metadata struct {
			Continue           string `json:"continue"`
			RemainingItemCount int64  `json:"remainingItemCount"`
		} `json:"metadata"`
		Items *[]persistentVolume `json:"items"`
	}
	if err := json.Unmarshal(b, &list); err != nil {
		return nil, err
	}
	switch {
	case list.Kind != "List" && list.Kind != "PersistentVolumeList":
		return nil, fmt.Errorf("its kind is %q, not List", list.Kind)
	case list.Metadata.Continue != "" || list.Metadata.RemainingItemCount != 0:
		return nil, errors.New("it is a part of the list, as its metadata says (continue, remainingItemCount); the whole list is needed")
	case list.Items == nil:
		return nil, errors.New("it has no items")
	}
	for _, pv := range *list.Items {
		if pv.Kind != "" && pv.Kind != "PersistentVolume" {
			return nil, fmt.Errorf("it has a %q, not only PersistentVolumes", pv.Kind)
		}
	}
	return *list.Items, nil
}

// isOf reports whether a PersistentVolume is tied to a node by its driver's topology key.
func (pv *persistentVolume) isOf(node string) bool {
	return slices.Contains(pv.nodes(), node)
}

// isOfAnother reports whether a PersistentVolume is tied by that key, and not to this node.
func (pv *persistentVolume) isOfAnother(node string) bool {
	nodes := pv.nodes()
	return len(nodes) > 0 && !slices.Contains(nodes, node)
}

// nodes are those that the driver's topology key names.
func (pv *persistentVolume) nodes() (nodes []string) {
	if pv.Spec.NodeAffinity == nil || pv.Spec.NodeAffinity.Required == nil {
		return nil
	}
	for _, term := range pv.Spec.NodeAffinity.Required.NodeSelectorTerms {
		for _, e := range term.MatchExpressions {
			if e.Key == "topology."+pv.Spec.CSI.Driver+"/node" && e.Operator == "In" {
				nodes = append(nodes, e.Values...)
			}
		}
	}
	return nodes
}

func (pv *persistentVolume) claim() string {
	if pv.Spec.ClaimRef == nil {
		return ""
	}
	return pv.Spec.ClaimRef.Namespace + "/" + pv.Spec.ClaimRef.Name
}

// compare adds what is missing on either side. all: every pool of the node was checked.
func (c *checkedPools) compare(list []persistentVolume, all bool) error {
	if c.node == "" {
		return errors.New("--persistent-volumes: give --node-id as well, because csi-node was not asked for it")
	}
	here, known, byKey := map[string]bool{}, map[string]bool{}, map[string]string{}
	for _, v := range c.volumes {
		known[v.GetId()] = true
		if here[v.GetId()] = slices.Contains(c.Pools, v.GetPool()); here[v.GetId()] {
			_, key, _, _ := volume.ParseID(v.GetId())
			byKey[key] = v.GetId()
		}
	}
	for _, m := range c.Findings {
		known[m.ID] = true // some part of it exists
	}
	handles := map[string]bool{}
	for _, pv := range list {
		if pv.Spec.CSI != nil && (c.driver == "" || pv.Spec.CSI.Driver == c.driver) {
			handles[pv.Spec.CSI.VolumeHandle] = true
		}
	}
	ours := false // the list has a volume of the driver, on any node
	for _, pv := range list {
		if pv.Spec.CSI == nil || c.driver != "" && pv.Spec.CSI.Driver != c.driver {
			continue
		}
		id := pv.Spec.CSI.VolumeHandle
		pool, key, _, ok := volume.ParseID(id)
		ours = ours || ok || c.driver != ""
		if here[id] && pv.isOfAnother(c.node) {
			c.Findings = append(c.Findings, misfit{Pool: pool, Kind: ofAnotherNode, ID: id, Claim: pv.claim(),
				Means: fmt.Sprintf("the volume is here, and its PersistentVolume %s is not of node %s: no pod with it starts on this node",
					pv.Metadata.Name, c.node),
				Do: `if this node had another name, follow "A node that comes back under another name" in docs/nodes.md`})
		}
		if !ok || known[id] || !pv.isOf(c.node) {
			continue
		}
		m := misfit{Pool: pool, Kind: withoutVolume, ID: id, Claim: pv.claim()}
		switch renamed := byKey[key]; {
		case renamed != "" && !handles[renamed]:
			handles[renamed] = true // it is this PersistentVolume's
			now, _, _, _ := volume.ParseID(renamed)
			m.Pool, m.Kind, m.ID = now, ofAnotherPool, renamed
			m.Means = fmt.Sprintf("the volume is here in pool %s, and its PersistentVolume %s names pool %s: no pod with it starts", now,
				pv.Metadata.Name, pool)
			m.Do = fmt.Sprintf("if the pool was called %s before, give it that name again, and restart csi-node; do not delete the volume", pool)
		case slices.Contains(c.Pools, pool):
			m.Means = fmt.Sprintf(
				"PersistentVolume %s is of this node, and the pool has no such volume: its data is not here, and no pod with "+
					"it starts", pv.Metadata.Name)
			m.Do = "if the pool is the right one (its disk, its directory), restore the claim from a backup and delete the PersistentVolume"
		case all && len(c.failed) == 0:
			m.Means = fmt.Sprintf("PersistentVolume %s is of this node, which has no pool %q", pv.Metadata.Name, pool)
			m.Do = "start csi-node with that pool again, or restore the claim from a backup and delete the PersistentVolume"
		default:
			continue
		}
		c.Findings = append(c.Findings, m)
	}
	var without []*inventory.Volume
	for _, v := range c.volumes {
		if !handles[v.GetId()] && slices.Contains(c.Pools, v.GetPool()) {
			without = append(without, v)
		}
	}
	if len(without) > 0 && !ours {
		c.failed = append(c.failed, fmt.Errorf("--persistent-volumes: the list has no PersistentVolume of this driver, although the pools "+
			"have volumes (%d). "+
			"It may be a part of the list (kubectl get pv with a selector) or another cluster's. The volumes were not compared; `crustctl volume "+
			"list` shows them", len(without)))
		return nil
	}
	for _, v := range without {
		c.Findings = append(c.Findings, misfit{
			Pool: v.GetPool(), Kind: withoutPersistentVolume, ID: v.GetId(), Claim: v.GetClaim(),
			Means: fmt.Sprintf("volume %s has no PersistentVolume: it was retained, or made by crustctl, or is being made just now",
				cmp.Or(v.GetName(), v.GetId())),
			Do: "look at it (crustctl volume show " + v.GetId() + "); `crustctl volume delete " + v.GetId() + "` destroys it and its data",
		})
	}
	return nil
}
